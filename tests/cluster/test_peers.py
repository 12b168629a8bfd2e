"""Tests of how processes agree on values, and name a process that does not answer."""

import math
import time

import pytest

from armillary.cluster import _peers
from armillary.cluster._peers import Peers
from armillary.errors import PeerError
from armillary.lifeline._tree import find_neighbors
from tests import peers
from tests.patience import patience
from tests.peers import make_peers, run_together


@pytest.mark.parametrize("count", [1, 2, 9, 10, 16, 100, 1024])
def test_a_text_passes_few_processes_and_few_connections(count):
    places = [find_neighbors(index, count) for index in range(count)]
    behind = [index for _, _, children in places for index in children]
    assert sorted(behind) == list(range(1, count))  # Each is behind one other.
    for index, (parent, members, children) in enumerate(places):
        assert len(children) <= 8
        assert members[0] == index
        if parent is not None:
            assert index in places[parent][2]
            assert set(members) < set(places[parent][1])
    depths = [0]
    for parent, *_ in places[1:]:
        depths.append(depths[parent] + 1)
    assert max(depths) <= math.ceil(math.log(7 * count + 1, 8)) <= 5


def test_equal_values_of_all_processes_are_sent_once():
    written: list[bytes] = []

    class Wire(peers.Wire):
        def write(self, data: bytes) -> None:
            written.append(data)
            super().write(data)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(peers, "Wire", Wire)
        everyone = make_peers(200)
    for each in reversed(everyone):
        each._lifeline.send_entry(["value", "number", "x" * 1000])
    assert len(written) == 2 * 199  # Once up and once down each connection.
    assert max(map(len, written)) < 1100
    assert everyone[150].gather("number", "y") == ["x" * 1000] * 200


def test_silent_processes_are_known_before_all_have_answered():
    everyone = make_peers(30)
    for each in everyone:
        if each.index not in (1, 3, 20):
            each._lifeline.send_entry(["value", "number", ""])
    for each in reversed(everyone):
        each._lifeline._beat(0.0)
    assert everyone[0]._lifeline.find_missing() == [1, 3, 20]
    assert everyone[7]._lifeline.find_missing() == [0]


def test_processes_answer_in_any_order_and_get_all_values_in_theirs():
    def talk(peers: Peers) -> list[list[str]]:
        time.sleep(0.05 * (peers.count - peers.index))
        return [peers.gather("number", f"{peers.index}-{i}") for i in range(2)]

    assert (
        run_together(talk, 3) == [[[f"{j}-{i}" for j in range(3)] for i in (0, 1)]] * 3
    )


def test_processes_at_different_points_are_named():
    for outcome in run_together(lambda peers: peers.gather("ab"[peers.index], "")):
        with pytest.raises(PeerError, match="at different points") as caught:
            raise outcome
        assert "process 0 of 2: a" in str(caught.value)
        assert "process 1 of 2: b" in str(caught.value)


@pytest.mark.parametrize(("failing", "count"), [(0, 3), (1, 3), (19, 20)])
def test_a_failure_reaches_the_others_at_their_next_round(failing, count):
    def talk(peers: Peers) -> object:
        peers.gather("start", "")
        if peers.index == failing:
            peers.announce_failure(ValueError("no disk"))
        return peers.gather("end", "")

    outcomes = run_together(talk, count)
    for index, outcome in enumerate(outcomes):
        with pytest.raises(PeerError) as caught:
            raise outcome
        if index == failing:
            assert "the job has failed before" in str(caught.value)
        else:
            assert "Another process has failed" in str(caught.value)
            assert f"process {failing} of {count}: ValueError: no disk" in str(
                caught.value
            )


def test_a_failure_is_named_to_the_launcher(monkeypatch):
    messages = []
    monkeypatch.setattr(
        _peers, "notify_launcher", lambda *message: messages.append(message)
    )

    def talk(peers: Peers) -> object:
        if peers.index == 1:
            peers.announce_failure(ValueError("no disk"))
        return peers.gather("end", "")

    run_together(talk)
    assert messages == [("caused_by", 1)]


def test_a_silent_process_is_named_in_time():
    def talk(peers: Peers) -> object:
        return peers.gather("end", "") if peers.index else None

    (_, outcome) = run_together(talk, timeout_seconds=0.0)
    with pytest.raises(PeerError, match="Process 0 of 2 has not answered for 0 sec"):
        raise outcome


@pytest.mark.slow
def test_the_silent_process_is_named_to_the_others():
    def talk(peers: Peers) -> object:
        return None if peers.index == 1 else peers.gather("end", "")

    # Process 2 must say its part before this time is over.
    seconds = round(patience(2))
    first, _, third = run_together(talk, count=3, timeout_seconds=seconds)
    match = f"Process 1 of 3 has not answered for {seconds} sec"
    with pytest.raises(PeerError, match=match):
        raise first
    with pytest.raises(PeerError, match=r"process 0 of 3: .*Process 1 of 3 has not"):
        raise third


def test_an_interrupt_of_a_waiting_process_is_sent_to_the_others():
    def talk(peers: Peers) -> object:
        peers.gather("start", "")
        if peers.index == victim:
            # It has sent its value.
            peers._lifeline.send_entry(["value", "end", ""])
            return peers.announce_failure(KeyboardInterrupt())
        peers.gather("end", "")  # It may end before the failure is known.
        return peers.gather("after the end", "")

    for victim in (0, 2):
        first, second, third = run_together(talk, 3)
        assert (first, second, third)[victim] is None
        with pytest.raises(PeerError, match=f"process {victim} of 3: KeyboardInterr"):
            raise second


def test_a_text_that_is_too_long_is_an_error_before_anything_is_sent():
    first, second = make_peers()
    with pytest.raises(
        ValueError, match=r"sends 4,194,305 characters for end, .* at most 4,1"
    ):
        first.gather("end", "x" * ((1 << 22) + 1))
    second._lifeline.send_entry(["value", "end", "2"])
    assert first.gather("end", "1") == ["1", "2"]


def test_an_error_is_announced_and_stays_itself():
    first, second = make_peers()
    with pytest.raises(OSError, match="no disk"), first.announcing_errors():
        raise OSError("no disk")
    with pytest.raises(PeerError, match="process 0 of 2: OSError: no disk"):
        second.gather("end", "")
