"""Tests of how processes exchange the addresses of their tree of connections."""

import json
import socket
import threading
import time
from typing import Any

import jax
import pytest

from armillary.cluster import _join as module
from armillary.cluster._peers import Peers
from armillary.errors import ClusterError
from armillary.lifeline._lifeline import Lifeline, Verdict
from tests.lifeline.test_lifeline import close
from tests.patience import patience, wait_until


class Store:
    """A key-value store like the store of the coordination service."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}
        self.is_down = False

    def key_value_set(self, key: str, value: str) -> None:
        self.values[key] = value

    def blocking_key_value_get(self, key: str, timeout_in_ms: int) -> str:
        end = time.monotonic() + timeout_in_ms / 1000
        while key not in self.values:
            if self.is_down or time.monotonic() > end:
                raise jax.errors.JaxRuntimeError("UNAVAILABLE: no answer")
            time.sleep(0.005)
        return self.values[key]


@pytest.fixture(autouse=True)
def _quiet(monkeypatch) -> None:
    monkeypatch.setattr(module, "delay_aborts", lambda: None)
    monkeypatch.setattr(module, "set_lifeline", lambda lifeline: None)


def test_processes_connect_at_the_address_of_the_coordinator_and_then_in_a_tree():
    store, count = Store(), 12
    lifelines: list[Any] = [None] * count

    def start(index: int) -> None:
        lifelines[index] = module.start_lifeline(store, index, count, "127.0.0.2:1")

    threads = [threading.Thread(target=start, args=(i,)) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(patience(120))
    answers = [Peers(i, count, patience(120), each) for i, each in enumerate(lifelines)]
    for each in answers[1:]:
        each._lifeline.send_entry(["value", "hello", str(each.index)])
    assert answers[0].gather("hello", "0") == [str(index) for index in range(count)]
    listening = [each._tree.ends.listener for each in lifelines]
    assert {each.getsockname()[0] for each in listening if each} <= {
        "127.0.0.1",
        "127.0.0.2",
    }
    assert [index for index, each in enumerate(listening) if each] == [0, 1, 3, 5, 7, 9]
    for lifeline in reversed(lifelines):
        lifeline.report_end()
    wait_until(lambda: all(map(lifelines[0].has_ended, range(count))))
    for lifeline in reversed(lifelines):
        close(lifeline)


def test_without_a_connection_a_job_does_not_begin():
    store = Store()
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    store.key_value_set(
        f"{module._LIFELINE_KEY}/0", json.dumps(["127.0.0.1", port, "t"])
    )
    match = (
        f"Process 1 of 2 cannot reach process 0 at 127.0.0.1:{port} .*open them betw"
    )
    with pytest.raises(ClusterError, match=match):
        module.start_lifeline(store, 1, 2, "127.0.0.1:1")
    store.values.clear()
    store.is_down = True
    with pytest.raises(ClusterError, match=r"process 0 .*JaxRuntimeError: UNAVAILABLE"):
        module.start_lifeline(store, 1, 2, "127.0.0.1:1")


def test_a_process_that_does_not_connect_is_named(monkeypatch):
    monkeypatch.setattr(module, "_CHILDREN_SECONDS", 0.2)
    monkeypatch.setattr(module, "Lifeline", started := Starting)
    with pytest.raises(ClusterError, match=r"Process 1 of 3 has not reached process 0"):
        module.start_lifeline(Store(), 0, 3, "127.0.0.1:1")
    close(started.last)


class Starting(Lifeline):
    """A lifeline that can be found."""

    last: "Starting"

    def start(self) -> None:
        Starting.last = self
        super().start()


class Knowing(Lifeline):
    """A lifeline that knows how others ended."""

    def __init__(self, *, ended: bool = False, verdict: str | None = None) -> None:
        super().__init__(0, 2)
        self._ended = ended
        self._verdict = None if verdict is None else Verdict(verdict)
        self.failures: list[BaseException] = []

    def has_ended(self, index: int) -> bool:
        return self._ended

    def find_missing(self) -> list[int]:
        return [1]

    def report_failure(self, error: BaseException) -> None:
        self.failures.append(error)


def test_waiting_for_a_process_that_has_ended_is_an_immediate_error(monkeypatch):
    peers = Peers(0, 2, patience(120), Knowing(ended=True))
    monkeypatch.setattr("armillary.cluster._peers._SLICE_SECONDS", 0.05)
    error = catch(lambda: peers.gather("whether to stop", ""))
    assert "Process 1 of 2 has reached the end of its program, while process 0" in error


def test_waiting_for_a_process_that_is_gone_tells_so(monkeypatch):
    peers = Peers(0, 2, patience(120), Knowing(verdict="Process 1 of 2 is gone."))
    monkeypatch.setattr("armillary.cluster._peers._SLICE_SECONDS", 0.05)
    assert catch(lambda: peers.gather("whether to stop", "")) == (
        "PeerError: Process 1 of 2 is gone."
    )


def test_an_error_that_another_process_caused_is_explained_and_not_sent():
    gone = Knowing(verdict="Process 1 of 2 is gone.")
    cause = Peers(0, 2, patience(120), gone).explain(ValueError("Gloo failed"))
    assert str(cause) == "Process 1 of 2 is gone."
    assert gone.failures == []


@pytest.mark.parametrize("error", [ValueError("bad data"), SystemExit(77)])
def test_an_own_error_is_sent_and_a_chosen_exit_is_not(error):
    lifeline = Knowing()
    peers = Peers(0, 2, patience(120), lifeline)
    assert peers.explain(error) is None
    assert lifeline.failures == ([error] if isinstance(error, ValueError) else [])
    assert peers.has_failed == isinstance(error, ValueError)


def catch(fn) -> str:
    try:
        fn()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""
