"""Waiting for data counts from the moment at which the device has nothing left."""

import time
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from armillary.data import from_arrays
from armillary.data.feed._stream import Prefetcher
from armillary.distribute import DefaultStrategy
from armillary.goodput import Category
from armillary.goodput._stopwatch import Stopwatch
from armillary.trainer._loop import Loop
from armillary.trainer._runner import LoopOptions, StepMethod, waiting_for_data


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


@pytest.mark.parametrize("compile_step", [True, False])
def test_the_first_batch_is_waited_for(compile_step):
    class Owner:
        def __init__(self):
            self.total = jnp.zeros(())

        def step(self, iterator):
            self.total = self.total + next(iterator)["x"].sum()

    def read():
        time.sleep(0.2)
        yield from from_arrays({"x": np.ones((8, 2), "float32")}, batch_size=4)

    owner = Owner()
    options = LoopOptions(steps_per_chunk=2, compile_step=compile_step)
    loop = Loop(
        StepMethod(owner, owner.step, "step", DefaultStrategy(), options),
        read,
    )
    stopwatch = Stopwatch()
    with stopwatch.phase(Category.STEPPING):
        assert loop.has_data()
        loop.run(2)
    loop.feed.close()

    assert float(owner.total) == 16
    assert stopwatch.seconds[Category.DATA] >= 0.2
