"""A clock that only tests move."""

from types import SimpleNamespace

import pytest

from armillary.goodput import _journal, _stopwatch


class FakeClock:
    """Gives `now`, which tests raise."""

    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = FakeClock()
    time = SimpleNamespace(perf_counter=clock, time=clock)
    monkeypatch.setattr(_stopwatch, "_now", clock)
    monkeypatch.setattr(_journal, "time", time)
    return clock
