"""Processes agree through a key-value store, or say who does not."""

import time

import pytest

from armillary.cluster._peers import Peers
from armillary.errors import PeerError
from tests.peers import Store, run_together


class Counting(Store):
    """A store that counts the requests of the chief, which comes last."""

    def __init__(self) -> None:
        super().__init__()
        self.num_requests = 0

    def key_value_dir_get(self, key: str) -> list[tuple[str, str]]:
        self.num_requests += 1
        return super().key_value_dir_get(key)

    def blocking_key_value_get(self, key: str, timeout_in_ms: int) -> str:
        self.num_requests += not key.endswith("/all")
        return super().blocking_key_value_get(key, timeout_in_ms)


@pytest.mark.parametrize("count", [3, 16])
def test_the_chief_collects_with_two_requests_once_all_have_answered(count):
    store = Counting()

    def talk(peers: Peers) -> list[str]:
        while not peers.index and len(store.values) < count - 1:
            time.sleep(0.01)
        return peers.gather("number", str(peers.index))

    outcomes = run_together(talk, count, store=store)
    assert outcomes == [[str(index) for index in range(count)]] * count
    assert store.num_requests == 2


def test_processes_answer_in_any_order_and_get_all_values_in_theirs():
    def talk(peers: Peers) -> list[list[str]]:
        time.sleep(0.05 * (peers.count - peers.index))
        return [peers.gather("number", f"{peers.index}-{i}") for i in range(2)]

    assert (
        run_together(talk, 3) == [[[f"{j}-{i}" for j in range(3)] for i in (0, 1)]] * 3
    )


def test_old_rounds_leave_nothing_behind():
    stores = []

    def talk(peers: Peers) -> None:
        stores.append(peers._store)
        for _ in range(130):
            peers.gather("number", "x")

    run_together(talk)
    rounds = {int(key.split("/")[2]) for key in stores[0].values}
    assert rounds == {128, 129}


def test_processes_at_different_points_are_named():
    for outcome in run_together(lambda peers: peers.gather("ab"[peers.index], "")):
        with pytest.raises(PeerError, match="at different points") as caught:
            raise outcome
        assert "process 0 of 2: a" in str(caught.value)
        assert "process 1 of 2: b" in str(caught.value)


@pytest.mark.parametrize("failing", [0, 1])
def test_a_failure_reaches_the_others_at_their_next_round(failing):
    def talk(peers: Peers) -> object:
        peers.gather("start", "")
        if peers.index == failing:
            peers.fail(ValueError("no disk"))
        return peers.gather("end", "")

    outcomes = run_together(talk, count=3)
    for index, outcome in enumerate(outcomes):
        with pytest.raises(PeerError) as caught:
            raise outcome
        if index == failing:
            assert "the job has failed before" in str(caught.value)
        else:
            assert "Another process has failed" in str(caught.value)
            assert f"process {failing} of 3: ValueError: no disk" in str(caught.value)


def test_a_silent_process_is_named_in_time():
    def talk(peers: Peers) -> object:
        return peers.gather("end", "") if peers.index else None

    (_, outcome) = run_together(talk, timeout_seconds=0.0)
    with pytest.raises(PeerError, match="Process 0 of 2 has not answered for 0 sec"):
        raise outcome


def test_the_others_are_told_who_is_silent():
    def talk(peers: Peers) -> object:
        return None if peers.index == 1 else peers.gather("end", "")

    first, _, third = run_together(talk, count=3, timeout_seconds=1.0)
    with pytest.raises(PeerError, match="Process 1 of 3 has not answered for 1 sec"):
        raise first
    with pytest.raises(PeerError, match=r"process 0 of 3: .*Process 1 of 3 has not"):
        raise third


class Interrupted(Store):
    """A store in which one process is interrupted while it waits."""

    def blocking_key_value_get(self, key: str, timeout_in_ms: int) -> str:
        if key == "armillary/0/1/1":
            raise KeyboardInterrupt
        return super().blocking_key_value_get(key, timeout_in_ms)


def test_the_others_are_told_of_an_interrupt_of_a_waiting_chief():
    def talk(peers: Peers) -> object:
        peers.gather("start", "")
        try:
            return peers.gather("end", "")
        except KeyboardInterrupt as error:
            peers.fail(error)

    first, second = run_together(talk, store=Interrupted())
    assert first is None
    with pytest.raises(PeerError, match="process 0 of 2: KeyboardInterrupt"):
        raise second


def test_a_store_that_is_down_is_reported():
    store = Store()
    store.is_down = True
    with pytest.raises(PeerError, match="Process 1 of 2 cannot be reached"):
        Peers(store, 0, 2, 10.0).gather("end", "")


def test_a_store_that_is_down_hides_no_other_error():
    store = Store()
    store.is_down = True
    peers = Peers(store, 0, 2, 10.0)
    with pytest.raises(OSError, match="no disk"), peers.announcing_errors():
        raise OSError("no disk")
