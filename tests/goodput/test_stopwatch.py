"""Every second is in one category, in whatever order events are reported."""

import threading
import time
import timeit

import jax
import jax.numpy as jnp
import pytest

from armillary.goodput import Category, _stopwatch
from armillary.goodput._stopwatch import PhaseClock, Stopwatch, get_stopwatch


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


def test_compilations_are_taken_out_of_the_phase_they_happen_in(clock):
    stopwatch = Stopwatch()
    with stopwatch.phase(Category.STEPPING):
        clock.now += 10
        stopwatch.compiled(4.0)
        clock.now += 3
        stopwatch.compiled(3.0)
        clock.now += 1

    assert spent(stopwatch) == {"stepping": 7.0, "compiling": 7.0}


def test_a_compilation_that_holds_others_counts_once(clock):
    stopwatch = Stopwatch()
    with stopwatch.phase(Category.STEPPING):
        clock.now += 5
        for _ in range(3):
            clock.now += 1
            stopwatch.compiled(1.0)
        clock.now += 2
        stopwatch.compiled(5.0)
        clock.now += 1

    assert spent(stopwatch) == {"stepping": 6.0, "compiling": 5.0}


def test_a_compilation_cannot_take_more_than_there_is(clock):
    stopwatch = Stopwatch()
    with stopwatch.phase(Category.STEPPING):
        clock.now += 1
        stopwatch.compiled(0.5)
        stopwatch.compiled(50.0)

    assert spent(stopwatch) == {"compiling": 1.0}


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


def test_a_phase_costs_microseconds():
    stopwatch = Stopwatch()

    def enter():
        with stopwatch.phase(Category.STEPPING):
            pass

    # The best of several: other programs run on this machine, too.
    seconds = min(timeit.repeat(enter, number=1000, repeat=5)) / 1000
    assert seconds < 50e-6


@pytest.fixture
def compiles(monkeypatch):
    """Returns a list; while something is in it, a program is being compiled."""
    things = []
    monkeypatch.setattr(_stopwatch, "is_making_program", lambda thread: bool(things))
    return things


def test_a_phase_begins_with_its_block_however_often_totals_are_read(compiles):
    stopwatch = Stopwatch()
    clock = PhaseClock(stopwatch)
    assert clock.look()[0] is None
    with stopwatch.phase(Category.STEPPING):
        began = time.perf_counter()
        _ = stopwatch.seconds
        stopwatch.switch(Category.STEPPING)
        category, since = clock.look()
        assert category is Category.STEPPING
        assert since <= began
        with stopwatch.phase(Category.DATA):
            assert clock.look()[0] is Category.DATA
        assert clock.look() >= (Category.STEPPING, began)


def test_compiling_is_a_phase_of_its_own(compiles):
    stopwatch = Stopwatch()
    clock = PhaseClock(stopwatch)
    with stopwatch.phase(Category.STEPPING):
        _, stepping = clock.look()
        compiles.append("a step")
        category, compiling = clock.look()
        assert category is Category.COMPILING
        assert compiling >= stepping
        with stopwatch.phase(Category.EVALUATING):
            assert clock.look() == (Category.COMPILING, compiling)
        compiles.clear()
        before = time.perf_counter()
        category, again = clock.look()
        assert category is Category.STEPPING
        assert compiling < again <= before


def test_nothing_is_compiled_outside_of_phases(compiles):
    compiles.append("something else")
    assert PhaseClock(Stopwatch()).look()[0] is None


def test_tracing_is_seen_from_another_thread():
    stopwatch, seen, done = Stopwatch(), [], threading.Event()
    clock = PhaseClock(stopwatch)

    def look():
        while not done.is_set():
            seen.append(clock.look()[0])
            time.sleep(0.01)

    def slow(x):
        time.sleep(0.1)
        return jnp.sin(x)

    thread = threading.Thread(target=look)
    thread.start()
    try:
        with stopwatch.phase(Category.STEPPING):
            jax.jit(slow)(1.0)
            time.sleep(0.1)
    finally:
        done.set()
        thread.join()
    named = [category for category in seen if category is not None]
    assert Category.COMPILING in named
    assert named[-1] is Category.STEPPING


def test_the_seconds_of_compilations_are_known_at_once():
    stopwatch = Stopwatch()
    with stopwatch.phase(Category.STEPPING):
        time.sleep(0.02)
        stopwatch.compiled(0.01)
        assert stopwatch.compile_seconds == pytest.approx(0.01)
    assert stopwatch.compile_seconds == pytest.approx(0.01)
    assert stopwatch.seconds[Category.COMPILING] == stopwatch.compile_seconds
