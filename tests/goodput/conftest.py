"""A clock that only tests move, and journals that they write."""

from types import SimpleNamespace

import pytest

from armillary.goodput import Category, _journal, _stopwatch
from armillary.goodput._journal import FILE_NAME, Entry


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


class Attempt:
    """Makes the entries of one attempt; `spend` tells what it does."""

    def __init__(self, name, start, step):
        self.name, self.time, self.step = name, start, step
        self.seconds = {}
        self.entries = []
        self.spend(0.0)

    def spend(self, seconds, category=Category.STEPPING, step=None, is_done=False):
        self.seconds[category] = self.seconds.get(category, 0.0) + seconds
        self.time += seconds
        self.step = self.step if step is None else step
        spent = dict(self.seconds)
        entry = Entry(self.name, "loop", self.time, self.step, is_done, spent)
        self.entries.append(entry)
        return self


def write_entries(directory, *entries):
    directory.mkdir(parents=True, exist_ok=True)
    with open(directory / FILE_NAME, "a") as file:
        file.write("".join(entry.as_line() for entry in entries))
