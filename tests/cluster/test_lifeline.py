"""Processes find each other's lifeline through the key-value store."""

import json
import logging
import socket
import time

import pytest

from armillary.cluster import _join as module
from armillary.cluster._peers import Peers
from armillary.lifeline._lifeline import Lifeline
from armillary.lifeline._link import listen
from tests.peers import Store


def test_processes_connect_at_the_address_of_the_coordinator(monkeypatch):
    store = Store()
    monkeypatch.setattr(module, "put_off_aborts", lambda: None)
    chief = module.start_lifeline(store, 0, 2, "127.0.0.1:1")
    other = module.start_lifeline(store, 1, 2, "127.0.0.1:1")
    assert chief is not None
    assert other is not None
    end = time.monotonic() + 10
    seen = [*chief._sightings.values(), *other._sightings.values()]
    while any(each.report.phase == "start" for each in seen):
        assert time.monotonic() < end
        time.sleep(0.02)
        seen = [*chief._sightings.values(), *other._sightings.values()]
    for lifeline in (other, chief):
        lifeline.tell_end()
        lifeline.close()


def test_a_lifeline_on_loopback_is_not_reached_from_elsewhere():
    listener = listen("127.0.0.1")
    assert listener.getsockname()[0] == "127.0.0.1"
    listener.close()


def test_without_a_connection_a_job_goes_on_with_a_warning(caplog):
    store = Store()
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    store.key_value_set(module._LIFELINE_KEY, json.dumps([port, "token"]))
    with caplog.at_level(logging.WARNING, "armillary"):
        assert module.start_lifeline(store, 1, 2, "127.0.0.1:1") is None
    assert "no connection that tells of dead and stuck processes" in caplog.text
    assert "Let the processes reach 127.0.0.1 on all ports" in caplog.text


@pytest.mark.parametrize("index", [0, 1])
def test_without_the_service_a_job_goes_on_with_a_warning(index, caplog):
    store = Store()
    store.is_down = True
    with caplog.at_level(logging.WARNING, "armillary"):
        assert module.start_lifeline(store, index, 2, "127.0.0.1:1") is None
    assert "dead and stuck processes (JaxRuntimeError: UNAVAILABLE" in caplog.text


class Knowing(Lifeline):
    """A lifeline that knows how others ended."""

    def __init__(self, *, ended: bool = False, verdict: str | None = None) -> None:
        super().__init__()
        self._ended, self.verdict = ended, verdict
        self.failures: list[str] = []

    def has_ended(self, index: int) -> bool:
        return self._ended

    def tell_failure(self, text: str) -> None:
        self.failures.append(text)


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


def test_an_error_that_another_process_caused_is_explained():
    gone = Knowing(verdict="Process 1 of 2 is gone.")
    cause = Peers(Store(), 0, 2, 60.0, gone).explain(ValueError("Gloo failed"))
    assert str(cause) == "Process 1 of 2 is gone."
    assert gone.failures == []


def test_an_error_of_ones_own_is_told_to_the_others():
    lifeline = Knowing()
    peers = Peers(Store(), 0, 2, 60.0, lifeline)
    assert peers.explain(ValueError("bad data")) is None
    assert lifeline.failures == ["ValueError: bad data"]
    assert peers.has_failed


def test_an_end_by_choice_is_no_failure():
    lifeline = Knowing()
    peers = Peers(Store(), 0, 2, 60.0, lifeline)
    assert peers.explain(SystemExit(77)) is None
    assert lifeline.failures == []
    assert not peers.has_failed


def catch(fn) -> str:
    try:
        fn()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""
