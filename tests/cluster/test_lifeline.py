"""Processes find each other's lifeline through the key-value store."""

import json
import logging
import socket
import time

import pytest

from armillary.cluster import _join as module
from armillary.cluster._peers import Peers
from armillary.lifeline._lifeline import Lifeline
from tests.lifeline.test_lifeline import close
from tests.peers import Store


def test_processes_connect_at_the_address_of_the_coordinator(monkeypatch):
    store = Store()
    monkeypatch.setattr(module, "put_off_aborts", lambda: None)
    monkeypatch.setattr(module, "set_lifeline", lambda lifeline: None)
    chief = module.start_lifeline(store, 0, 2, "127.0.0.1:1")
    other = module.start_lifeline(store, 1, 2, "127.0.0.1:1")
    assert chief is not None
    assert other is not None
    assert chief._tree.endpoint.getsockname()[0] == "127.0.0.1"
    end = time.monotonic() + 10
    seen = [*chief._sightings.values(), *other._sightings.values()]
    while any(each.report.phase == "start" for each in seen):
        assert time.monotonic() < end
        time.sleep(0.02)
        seen = [*chief._sightings.values(), *other._sightings.values()]
    for lifeline in (other, chief):
        lifeline.tell_end()
        close(lifeline)


def test_without_a_connection_a_job_goes_on_with_a_warning(caplog):
    store = Store()
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    store.key_value_set(module._LIFELINE_KEY, json.dumps([port, "token"]))
    with caplog.at_level(logging.WARNING, "armillary"):
        assert module.start_lifeline(store, 1, 2, "127.0.0.1:1") is None
    assert "no connection that tells of dead and stuck processes" in caplog.text
    assert "Let the processes reach 127.0.0.1 on all ports" in caplog.text


def test_without_the_service_a_job_goes_on_with_a_warning(caplog):
    store = Store()
    store.is_down = True
    with caplog.at_level(logging.WARNING, "armillary"):
        assert module.start_lifeline(store, 1, 2, "127.0.0.1:1") is None
    assert "dead and stuck processes (JaxRuntimeError: UNAVAILABLE" in caplog.text


class Knowing(Lifeline):
    """A lifeline that knows how others ended."""

    def __init__(self, *, ended: bool = False, verdict: str | None = None) -> None:
        super().__init__()
        self._ended, self.verdict = ended, verdict
        self.failures: list[BaseException] = []

    def has_ended(self, index: int) -> bool:
        return self._ended

    def tell_failure(self, error: BaseException) -> None:
        self.failures.append(error)


def test_waiting_for_a_process_that_has_ended_is_an_error_at_once(monkeypatch):
    peers = Peers(Store(), 0, 2, 60.0, Knowing(ended=True))
    monkeypatch.setattr("armillary.cluster._peers._SLICE_SECONDS", 0.05)
    error = catch(lambda: peers.gather("whether to stop", ""))
    assert "Process 1 of 2 has reached the end of its program, while process 0" in error


def test_waiting_for_a_process_that_is_gone_tells_so(monkeypatch):
    peers = Peers(Store(), 0, 2, 60.0, Knowing(verdict="Process 1 of 2 is gone."))
    monkeypatch.setattr("armillary.cluster._peers._SLICE_SECONDS", 0.05)
    assert catch(lambda: peers.gather("whether to stop", "")) == (
        "PeerError: Process 1 of 2 is gone."
    )


def test_an_error_that_another_process_caused_is_explained_and_not_told():
    gone = Knowing(verdict="Process 1 of 2 is gone.")
    cause = Peers(Store(), 0, 2, 60.0, gone).explain(ValueError("Gloo failed"))
    assert str(cause) == "Process 1 of 2 is gone."
    assert gone.failures == []


@pytest.mark.parametrize("error", [ValueError("bad data"), SystemExit(77)])
def test_an_error_of_ones_own_is_told_and_an_end_by_choice_is_not(error):
    lifeline = Knowing()
    peers = Peers(Store(), 0, 2, 60.0, lifeline)
    assert peers.explain(error) is None
    assert lifeline.failures == ([error] if isinstance(error, ValueError) else [])
    assert peers.has_failed == isinstance(error, ValueError)


def catch(fn) -> str:
    try:
        fn()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""
