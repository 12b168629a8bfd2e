"""Tests that every second is in exactly one category."""

import threading

import jax
import jax.numpy as jnp
import pytest

import armillary
from armillary.goodput import Category
from armillary.goodput._stopwatch import Stopwatch, compiling, get_stopwatch


def spent(stopwatch):
    return {str(name): value for name, value in stopwatch.seconds.items() if value}


def test_inner_phases_interrupt_outer_ones(clock):
    stopwatch = Stopwatch(Category.START_UP, elapsed=3.0)
    clock.now += 1
    with stopwatch.phase(Category.OTHER):
        clock.now += 2
        with stopwatch.phase(Category.STEPPING):
            clock.now += 10
        clock.now += 4
    clock.now += 1

    assert spent(stopwatch) == {"start_up": 5.0, "other": 6.0, "stepping": 10.0}


def test_a_phase_ends_with_an_error_and_nothing_is_counted_outside(clock):
    stopwatch = Stopwatch()
    clock.now += 100
    with pytest.raises(KeyError), stopwatch.phase(Category.SAVING):
        clock.now += 1
        raise KeyError("x")
    stopwatch.compiled(1.0)
    clock.now += 100

    assert spent(stopwatch) == {"saving": 1.0}
    assert get_stopwatch() is stopwatch.category is None


@pytest.mark.parametrize(
    ("events", "stepping", "compiling"),
    [
        pytest.param([(10, 4), (3, 3), (1, 0)], 7, 7, id="apart"),
        # One that holds others, which were reported before it, counts once.
        pytest.param([(6, 1), (1, 1), (1, 1), (2, 5), (1, 0)], 6, 5, id="nested"),
        pytest.param([(1, 0.5), (0, 50)], 0, 1, id="more than there is"),
    ],
)
def test_compilations_are_taken_out_of_the_phase_they_happen_in(
    clock, events, stepping, compiling
):
    stopwatch = Stopwatch()
    with stopwatch.phase(Category.STEPPING):
        for passed, reported in events:
            clock.now += passed
            if reported:
                stopwatch.compiled(reported)
        assert stopwatch.compile_seconds == compiling

    assert stopwatch.seconds[Category.STEPPING] == stepping
    assert stopwatch.seconds[Category.COMPILING] == compiling


def test_work_around_a_compilation_counts_with_it_once(clock):
    stopwatch = Stopwatch()
    with stopwatch.phase(Category.STEPPING):
        clock.now += 1
        with compiling():
            clock.now += 2
            stopwatch.compiled(2.0)
            clock.now += 4
    with compiling():
        clock.now += 100

    assert spent(stopwatch) == {"stepping": 1.0, "compiling": 6.0}


def test_the_trace_of_a_step_counts_as_compilation(clock):
    class Trainer(armillary.StandardTrainer):
        def train_step(self, iterator):
            clock.now += 1000.0

        def train_loop_end(self):
            clock.now += 100.0

    options = armillary.StandardTrainerOptions(compile_hooks=True)
    stopwatch = Stopwatch()
    with stopwatch.phase(Category.STEPPING):
        Trainer(None, options).train(2)

    assert stopwatch.seconds[Category.COMPILING] >= 1100.0
    assert stopwatch.seconds[Category.STEPPING] < 100.0


def test_jax_reports_compilations_of_this_thread_only():
    def compile_one(factor):
        with_new_constant = jax.jit(lambda x: jnp.sin(x) * factor)
        with_new_constant(jnp.ones(3)).block_until_ready()

    stopwatch = Stopwatch()
    with stopwatch.phase(Category.STEPPING):
        thread = threading.Thread(target=compile_one, args=(2.5,))
        thread.start()
        thread.join()
    elsewhere = stopwatch.seconds[Category.COMPILING]
    with stopwatch.phase(Category.STEPPING):
        compile_one(3.5)

    assert elsewhere == 0
    assert stopwatch.seconds[Category.COMPILING] > 0
    assert stopwatch.seconds[Category.STEPPING] > 0
