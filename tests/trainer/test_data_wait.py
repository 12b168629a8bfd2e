"""Tests that waiting for data counts only while the device has nothing to do."""

from typing import Any

import pytest

from armillary.distribute import DefaultStrategy
from armillary.goodput import Category, _stopwatch
from armillary.goodput._stopwatch import Stopwatch
from armillary.trainer._data_wait import waiting_for_data
from tests.goodput.conftest import FakeClock


class Program:
    """A program that runs on the device until a time."""

    def __init__(self, clock, end):
        self.clock, self.end = clock, end

    def is_ready(self):
        return self.clock.now >= self.end


class Queue:
    """Stands for a `Prefetcher`: waiting for its next item lets time pass."""

    def __init__(self, clock, seconds, has_thread):
        self.clock, self.has_thread = clock, has_thread
        self.seconds, self.end = seconds, clock.now + seconds

    @property
    def is_ready(self):
        return self.has_thread and self.clock.now >= self.end

    def is_coming(self, seconds):
        if self.has_thread:
            self.clock.now += seconds
        return self.has_thread and not self.is_ready

    def head(self):
        end = self.end if self.has_thread else self.clock.now + self.seconds
        self.clock.now = max(self.clock.now, end)


def measure(clock, data_seconds, device_seconds, has_thread):
    """Returns the seconds of stepping and of waiting for one item of data."""
    strategy = DefaultStrategy()
    for seconds in (60.0, device_seconds):  # Only the newest program counts.
        strategy.dispatch.started(Program(clock, clock.now + seconds))
    queue: Any = Queue(clock, data_seconds, has_thread)
    stopwatch = Stopwatch()
    with stopwatch.phase(Category.STEPPING), waiting_for_data(queue, strategy):
        queue.head()
    return stopwatch.seconds[Category.STEPPING], stopwatch.seconds[Category.DATA]


@pytest.mark.parametrize(
    ("data_seconds", "device_seconds", "has_thread", "stepping", "waiting"),
    [
        (0.5, 0.0, True, 0.0, 0.5),
        (0.3, 9.0, True, 0.3, 0.0),
        (0.5, 0.2, True, 0.2, 0.3),
        (0.5, 0.0, False, 0.0, 0.5),
        (0.3, 9.0, False, 0.3, 0.0),
        (0.5, 0.2, False, 0.0, 0.5),  # Nobody looks at the device meanwhile.
    ],
)
def test_only_an_idle_device_waits(
    monkeypatch, data_seconds, device_seconds, has_thread, stepping, waiting
):
    clock = FakeClock()
    monkeypatch.setattr(_stopwatch, "_now", clock)
    measured = measure(clock, data_seconds, device_seconds, has_thread)
    # A look at the device comes every few milliseconds.
    assert measured == pytest.approx((stepping, waiting), abs=0.02)
