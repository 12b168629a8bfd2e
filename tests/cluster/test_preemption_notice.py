"""Tests of the handler of SIGTERM, and of the handler that it replaces."""

import gc
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from armillary.cluster import TerminationConfig, _preemption
from armillary.cluster._preemption import PreemptionNotice
from armillary.launch._environment import find_addresses
from tests.patience import patience, wait_until


@pytest.fixture
def heard() -> Iterator[list[int]]:
    """Returns what a handler of the program's own has heard."""
    numbers: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: numbers.append(number))
    yield numbers
    signal.signal(signal.SIGTERM, before)


def terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def test_a_signal_is_remembered_and_nothing_else(heard):
    notice = PreemptionNotice()
    assert notice.source is None
    terminate()
    terminate()
    assert notice.source == "SIGTERM"
    assert heard == []
    notice.close()


def test_closing_puts_the_handler_of_the_program_back(heard):
    before = signal.getsignal(signal.SIGTERM)
    notice = PreemptionNotice()
    assert signal.getsignal(signal.SIGTERM) is not before
    notice.close()
    notice.close()
    assert signal.getsignal(signal.SIGTERM) is before
    terminate()
    assert heard == [signal.SIGTERM]
    assert notice.source is None


@pytest.mark.parametrize("is_closed", [False, True])
def test_a_notice_forgotten_or_closed_in_another_thread_passes_on(heard, is_closed):
    notice = PreemptionNotice()
    if is_closed:
        thread = threading.Thread(target=notice.close)
        thread.start()
        thread.join()
    del notice
    gc.collect()
    terminate()
    terminate()
    assert heard == [signal.SIGTERM] * 2


def test_a_handler_that_the_program_sets_later_stays(heard):
    notice = PreemptionNotice()
    later: list[int] = []
    handler: Any = signal.signal(signal.SIGTERM, lambda number, _: later.append(number))
    notice.listen()
    terminate()
    assert (notice.source, later) == (None, [signal.SIGTERM])
    notice.close()
    terminate()
    assert len(later) == 2
    # It may pass on what it gets, as if nothing had been in between.
    handler(signal.SIGTERM, None)
    assert heard == [signal.SIGTERM]


def test_a_signal_that_was_ignored_is_ignored_again():
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        notice = PreemptionNotice()
        handler: Any = signal.getsignal(signal.SIGTERM)
        notice.close()
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_IGN
        handler(signal.SIGTERM, None)
    finally:
        signal.signal(signal.SIGTERM, before)


CHILDREN = """
import os, signal, time
from armillary.cluster._preemption import PreemptionNotice

notice = PreemptionNotice()
reader, writer = os.pipe()
child = os.fork()
if not child:
    # Python drops signals that come within the fork.
    os.write(writer, b"x")
    for _ in range(600):  # One that comes as a sleep begins waits for its end.
        time.sleep(0.1)
    os._exit(0)
os.read(reader, 1)
os.kill(child, signal.SIGTERM)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), notice.source)
del notice
os.kill(os.getpid(), signal.SIGTERM)
time.sleep(60)
"""


@pytest.mark.slow
def test_forked_children_and_those_who_forget_end_by_the_signal():
    result = subprocess.run(
        [sys.executable, "-c", CHILDREN],
        capture_output=True,
        text=True,
        timeout=patience(120),
    )
    assert result.stdout == "-15 None\n", result.stderr
    assert result.returncode == -signal.SIGTERM


JOINED_BY_HAND = """
import os, signal, sys
import jax
from armillary.cluster._preemption import PreemptionNotice

notice = PreemptionNotice()
jax.distributed.initialize(sys.argv[1], 1, 0)
os.kill(os.getpid(), signal.SIGTERM)
before = notice.source
notice.listen()
os.kill(os.getpid(), signal.SIGTERM)
print(before, notice.source, flush=True)
# JAX's service, which has heard a signal too, may wait for ever at the end.
os._exit(0)
"""


@pytest.mark.slow
def test_a_signal_that_jax_took_is_taken_back():
    (address,) = find_addresses(1)
    environment = {**os.environ, "JAX_COORDINATOR_BIND_ADDRESS": address}
    result = subprocess.run(
        [sys.executable, "-c", JOINED_BY_HAND, address],
        capture_output=True,
        text=True,
        timeout=patience(120),
        env=environment,
    )
    # A JAX that leaves the signal alone would make `listen` needless.
    assert result.stdout.splitlines()[-1:] == ["None SIGTERM"], result.stderr


def test_a_watcher_gives_notice_when_its_answer_becomes_true(monkeypatch, heard):
    monkeypatch.setattr(_preemption, "_POLL_SECONDS", 0.001)
    asked, answer = [], False

    def watcher() -> bool:
        asked.append(threading.current_thread())
        return answer

    notice = PreemptionNotice(watcher)
    wait_until(lambda: len(asked) > 3, "the watcher to be asked")
    assert notice.source is None
    answer = True
    wait_until(lambda: notice.source, "a notice")
    assert notice.source == "`watcher`"
    # As long as it stays true, it is one notice.
    notice.source = None
    asked.clear()
    wait_until(lambda: len(asked) > 3, "the watcher to be asked")
    assert notice.source is None
    answer = False
    asked.clear()
    wait_until(lambda: len(asked) > 3, "the watcher to be asked")
    answer = True
    wait_until(lambda: notice.source, "a second notice")
    thread = asked[0]
    notice.close()
    thread.join(patience(120))
    assert not thread.is_alive()


def test_a_watcher_that_fails_is_logged_once_and_asked_again(
    monkeypatch, heard, caplog
):
    monkeypatch.setattr(_preemption, "_POLL_SECONDS", 0.001)
    num_calls = 0

    def watcher() -> bool:
        nonlocal num_calls
        num_calls += 1
        if num_calls < 5:
            raise OSError("no route to the metadata server")
        return True

    notice = PreemptionNotice(watcher)
    wait_until(lambda: notice.source, "a notice")
    notice.close()
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert "`watcher` of `TerminationConfig` failed" in record.getMessage()
    assert "no route to the metadata server" in record.getMessage()


@pytest.mark.parametrize("name", ["exit_fn", "watcher"])
def test_callbacks_must_be_callable(name):
    with pytest.raises(TypeError, match=f"`{name}` is 77 of type int, but it must be"):
        TerminationConfig(**{name: 77})
