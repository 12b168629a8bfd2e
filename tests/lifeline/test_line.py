"""Tests that a message names a line of the user's code."""

import gc
import json
import linecache
import sys
import threading
import time

import pytest

from armillary.lifeline import _lines
from tests.patience import patience, wait_until


def test_the_innermost_line_of_the_program_is_found_below_a_library():
    found = []

    def ask() -> None:
        # `json` is a library, and calls back.
        json.loads("{}", object_hook=lambda _: found.append(_lines.find_line("step")))

    ask()
    (text,) = found
    assert "test_line.py:" in text
    assert "in <lambda>: json.loads" in text


def test_a_thread_that_reads_ahead_is_named_while_data_is_waited_for():
    is_there, may_go = threading.Event(), threading.Event()

    def read_slowly() -> None:
        is_there.set()
        may_go.wait(patience(120))

    thread = threading.Thread(target=read_slowly, name="armillary-prefetch")
    thread.start()
    is_there.wait(patience(120))
    try:
        data, step = _lines.find_line("data"), _lines.find_line("step")
    finally:
        may_go.set()
        thread.join()
    assert "while a thread reads ahead at" in data
    assert "in read_slowly: may_go.wait(patience(120))" in data
    assert "read_slowly" not in step


def test_a_function_that_has_only_begun_is_at_no_line():
    line = _lines.Line(json.__file__, 0, "loads")
    assert _lines._describe_line(line) == f"{json.__file__}:0 in loads"


def test_a_thread_that_has_ended_has_no_stack():
    thread = threading.Thread(target=int)
    thread.start()
    thread.join()
    assert _lines.read_stack(thread.ident) == []


@pytest.mark.slow
def test_a_stack_is_read_at_one_moment():
    has_begun, is_over = threading.Event(), threading.Event()
    kept = sys.getswitchinterval(), gc.get_threshold()

    def left(depth: int) -> None:
        left(depth - 1) if depth else None

    def right(depth: int) -> None:
        right(depth - 1) if depth else None

    def work() -> None:
        has_begun.set()
        while not is_over.is_set():
            left(20)
            right(20)

    # The collector calls functions of Python, between which threads may change.
    gc.callbacks.append(pause)
    thread = threading.Thread(target=work)
    thread.start()
    has_begun.wait(patience(120))
    sys.setswitchinterval(1e-5)
    gc.set_threshold(10, 10, 10)
    seen, num_reads = set(), 0
    end = time.monotonic() + patience(120)
    try:
        # Long enough to meet a moment at which the thread changes its function.
        while num_reads < 2000 or (len(seen) < 2 and time.monotonic() < end):
            num_reads += 1
            stack = _lines.read_stack(thread.ident)
            *inner, worker = [line for line in stack if line.file == __file__]
            if names := {line.function for line in inner}:
                line = linecache.getline(__file__, worker.number)
                assert names == {line.strip().removesuffix("(20)")}
                seen.update(names)
    finally:
        sys.setswitchinterval(kept[0])
        gc.set_threshold(*kept[1])
        gc.callbacks.remove(pause)
        is_over.set()
        thread.join()
    assert seen == {"left", "right"}
    # A lifeline of another test may read a stack at this moment.
    wait_until(gc.isenabled)


def pause(*_: object) -> None:
    for _number in range(100):
        continue


def test_the_collector_is_as_it_was_after_a_read_also_one_that_fails(monkeypatch):
    monkeypatch.setattr(sys, "_current_frames", lambda: {}["thread"])
    with pytest.raises(KeyError):
        _lines.read_stack()
    assert gc.isenabled()
    monkeypatch.undo()
    gc.disable()
    try:
        assert _lines.read_stack()
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_compiling_is_recognized_by_the_stack():
    import jax
    import jax.numpy as jnp

    seen, is_done = [], threading.Event()

    def look() -> None:
        while not is_done.is_set():
            seen.append(_lines.is_in(_lines.COMPILER, _lines.read_stack()))

    thread = threading.Thread(target=look)
    thread.start()
    try:
        for size in range(3, 6):
            jax.jit(lambda x: jnp.linalg.svd(jnp.sin(x) @ x)[0])(jnp.ones((size, size)))
    finally:
        is_done.set()
        thread.join()
    assert any(seen)
    assert not _lines.is_in(_lines.COMPILER, _lines.read_stack())


def is_own_in(files):
    return _lines.is_in(files, _lines.read_stack(threading.get_ident()))


def test_tracing_and_lowering_make_a_program():
    import jax

    seen = []

    def traced(x):
        seen.append(is_own_in(_lines.MAKERS))
        return x

    jax.jit(traced)(1.0)
    assert seen == [True]
    assert not is_own_in(_lines.MAKERS)


def test_a_debugger_is_recognized_by_the_stack():
    import bdb

    seen = []
    debugger = bdb.Bdb()
    debugger.runcall(lambda: seen.append(is_own_in(_lines.DEBUGGER)))

    assert seen == [True]
    assert not is_own_in(_lines.DEBUGGER)
