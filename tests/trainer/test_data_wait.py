"""Waiting for data counts from the moment at which the device has nothing left."""

import time
from typing import Any

import pytest

from armillary.data.feed._stream import Prefetcher
from armillary.distribute import DefaultStrategy
from armillary.goodput import Category
from armillary.goodput._stopwatch import Stopwatch
from armillary.trainer._runner import waiting_for_data


class Owner:
    """What holds a `Prefetcher`."""


OWNER = Owner()


class Program:
    """A program that runs for some time."""

    def __init__(self, seconds):
        self.end = time.perf_counter() + seconds

    def is_ready(self):
        return time.perf_counter() >= self.end


def measure(data_seconds, device_seconds, prefetch):
    """Returns the seconds of stepping and of waiting for one item of data."""

    def read():
        yield "first"
        time.sleep(data_seconds)
        yield "second"

    data: Any = Prefetcher(read(), prefetch, OWNER)
    assert next(data) == "first"
    strategy = DefaultStrategy()
    for seconds in (60.0, device_seconds):  # Only the newest program counts.
        strategy.dispatch.started(Program(seconds))
    stopwatch = Stopwatch()
    with stopwatch.phase(Category.STEPPING), waiting_for_data(data, strategy):
        assert data.head() == "second"
    data.close()
    return stopwatch.seconds[Category.STEPPING], stopwatch.seconds[Category.DATA]


@pytest.mark.parametrize(
    ("data_seconds", "device_seconds", "prefetch", "stepping", "waiting"),
    [
        (0.5, 0.0, 1, 0.0, 0.5),
        (0.3, 9.0, 1, 0.3, 0.0),
        (0.5, 0.2, 1, 0.2, 0.3),
        (0.5, 0.0, 0, 0.0, 0.5),
        (0.3, 9.0, 0, 0.3, 0.0),
        (0.5, 0.2, 0, 0.0, 0.5),  # Nobody looks at the device meanwhile.
    ],
)
def test_only_an_idle_device_waits(
    data_seconds, device_seconds, prefetch, stepping, waiting
):
    measured = measure(data_seconds, device_seconds, prefetch)
    assert measured == pytest.approx((stepping, waiting), abs=0.1)
