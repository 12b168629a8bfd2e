"""Waiting for data counts from the moment at which the device has nothing left."""

import threading
import time
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from armillary.data import from_arrays
from armillary.distribute import DefaultStrategy, Strategy
from armillary.goodput import Category, Stopwatch
from armillary.loops._data_wait import reading, waiting_for_data
from armillary.loops._loop import Loop, LoopOptions


class Program:
    """A program that runs until it is told to end."""

    def __init__(self):
        self.end = threading.Event()

    def is_ready(self):
        return self.end.is_set()

    def block_until_ready(self):
        assert self.end.wait(60)


def make_strategy(*programs) -> Strategy:
    strategy = DefaultStrategy()
    for program in programs:
        strategy.dispatch.started(program)
    return strategy


NOT_READY = SimpleNamespace(is_ready=False)


def measure(chunks, strategy, end=lambda: None):
    stopwatch = Stopwatch()
    with (
        stopwatch.phase(Category.STEPPING),
        waiting_for_data(chunks, strategy),
    ):
        time.sleep(0.2)
        end()
        time.sleep(0.3)
    seconds = stopwatch.seconds
    return seconds[Category.STEPPING], seconds[Category.DATA]


def test_an_idle_device_waits_for_data():
    stepping, data = measure(NOT_READY, make_strategy())
    assert data >= 0.5
    assert stepping < 0.1


def test_a_busy_device_waits_for_nothing():
    program = Program()
    stepping, data = measure(NOT_READY, make_strategy(program))
    program.end.set()
    assert stepping >= 0.5
    assert data == 0


def test_a_device_that_ends_meanwhile_waits_from_then_on():
    program = Program()
    stepping, data = measure(NOT_READY, make_strategy(program), program.end.set)
    assert stepping >= 0.2
    assert 0.2 <= data <= 0.5


def test_only_the_newest_program_counts():
    done = Program()
    done.end.set()
    _, data = measure(NOT_READY, make_strategy(Program(), done))
    assert data >= 0.5


def test_a_chunk_that_is_there_is_no_wait():
    _, data = measure(SimpleNamespace(is_ready=True), make_strategy())
    assert data == 0


def test_without_a_stopwatch_nothing_is_counted():
    stopwatch = Stopwatch()
    with waiting_for_data(NOT_READY, make_strategy()), reading():
        time.sleep(0.01)
    assert sum(stopwatch.seconds.values()) == 0


def test_reading_in_the_thread_of_the_loop_counts():
    stopwatch = Stopwatch()
    with stopwatch.phase(Category.STEPPING), reading():
        time.sleep(0.1)
    assert stopwatch.seconds[Category.DATA] >= 0.1


def test_a_program_that_fails_has_ended():
    class Failing(Program):
        def block_until_ready(self):
            raise jax.errors.JaxRuntimeError("INTERNAL: no such device")

    _, data = measure(NOT_READY, make_strategy(Failing()))
    assert data >= 0.5


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
    loop = Loop(
        owner,
        owner.step,
        "step",
        read,
        DefaultStrategy(),
        LoopOptions(steps_per_chunk=2, compile_step=compile_step),
        exact=False,
        keep_results=False,
    )
    stopwatch = Stopwatch()
    with stopwatch.phase(Category.STEPPING):
        assert loop.has_data()
        loop.run(2)
    loop.close()

    assert float(owner.total) == 16
    assert stopwatch.seconds[Category.DATA] >= 0.2
