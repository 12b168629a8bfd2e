"""What a program does now, as another thread sees it."""

import threading
import time

import jax
import jax.numpy as jnp
import pytest

from armillary.goodput import Category, _stopwatch
from armillary.goodput._stopwatch import PhaseClock, Stopwatch


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
