"""Tests that Ctrl-C and other signals wait until a critical block is done."""

import signal
from typing import Any

import pytest

from armillary.distribute import _dispatch as _interrupts
from armillary.distribute._dispatch import uninterrupted


class StopError(Exception):
    pass


@pytest.fixture(params=["SIGTERM", "SIGALRM", "SIGHUP"])
def raising(request):
    """A signal whose handler raises."""

    def stop(number, frame):
        raise StopError(number)

    number = getattr(signal, request.param)
    before = signal.signal(number, stop)
    yield number
    signal.signal(number, before)


def test_an_interrupt_waits_until_the_block_is_done():
    done = []
    with pytest.raises(KeyboardInterrupt), uninterrupted():
        signal.raise_signal(signal.SIGINT)
        done.append(True)
    assert done


def test_none_of_several_signals_is_lost(raising):
    heard = []
    before = signal.signal(signal.SIGUSR1, lambda number, _: heard.append(number))
    with pytest.raises(StopError), uninterrupted():
        for number in (signal.SIGINT, signal.SIGUSR1, raising, signal.SIGUSR1):
            signal.raise_signal(number)
        assert not heard
    signal.signal(signal.SIGUSR1, before)
    assert heard == [signal.SIGUSR1]


def test_a_signal_that_comes_while_handlers_are_put_back_is_not_lost(monkeypatch):
    before = signal.getsignal(signal.SIGINT)
    put: Any = _interrupts.set_handler

    def interrupt_first(number, handler):
        if handler is before:
            monkeypatch.setattr(_interrupts, "set_handler", put)
            signal.raise_signal(signal.SIGINT)
        return put(number, handler)

    with pytest.raises(KeyboardInterrupt), uninterrupted():
        monkeypatch.setattr(_interrupts, "set_handler", interrupt_first)
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    signal.signal(signal.SIGINT, before)
