"""The line that is named is the user's."""

import json
import os
import threading
from typing import Any

import pytest

from armillary.lifeline import _ending


def test_the_innermost_line_of_the_program_is_found_below_a_library():
    found = []

    def ask() -> None:
        # `json` is a library, and calls back.
        json.loads("{}", object_hook=lambda _: found.append(_ending.find_line("step")))

    ask()
    (text,) = found
    assert "test_line.py:" in text
    assert "in <lambda>: json.loads" in text


def test_a_thread_that_reads_ahead_is_named_while_data_is_waited_for():
    is_there, may_go = threading.Event(), threading.Event()

    def read_slowly() -> None:
        is_there.set()
        may_go.wait(10)

    thread = threading.Thread(target=read_slowly, name="armillary-prefetch")
    thread.start()
    is_there.wait(10)
    try:
        data, step = _ending.find_line("data"), _ending.find_line("step")
    finally:
        may_go.set()
        thread.join()
    assert "while a thread reads ahead at" in data
    assert "in read_slowly: may_go.wait(10)" in data
    assert "read_slowly" not in step


def test_a_function_that_has_only_begun_is_at_no_line():
    line = _ending.Line(json.__file__, "???", "loads")
    assert _ending._describe(line) == f"{json.__file__}:??? in loads"


def test_files_may_have_any_name(tmp_path):
    for name in ('jörg "x" in \u4f60.py', r"a\new\x41\u1.py"):
        path = tmp_path / name
        path.write_text("found = find()")
        names: dict[str, Any] = {"find": lambda: read_own()[3]}
        exec(compile(path.read_text(), path, "exec"), names)
        assert names["found"] == (str(path), "1", "<module>")


def read_own():
    return _ending._read_stack(_ending._dump_stacks(), threading.get_ident())


@pytest.mark.parametrize("lacks", ["files in memory", "files", "room"])
def test_lines_are_found_where_something_lacks(lacks, monkeypatch):
    if lacks == "files in memory":
        monkeypatch.delattr(os, "memfd_create")
    if lacks == "files":
        monkeypatch.setattr(os, "memfd_create", lambda _: os.open("/nowhere", 0))
    may_go = threading.Event()
    num_threads = 120 if lacks == "room" else 1
    threads = [threading.Thread(target=may_go.wait) for _ in range(num_threads)]
    for thread in threads:
        thread.start()
    try:
        assert "test_line.py" in _ending.find_line("step")
    finally:
        may_go.set()
        for thread in threads:
            thread.join()


def test_compiling_is_told_by_the_stack():
    import jax
    import jax.numpy as jnp

    seen, is_done = [], threading.Event()

    def look() -> None:
        while not is_done.is_set():
            seen.append(_ending.is_in(_ending.COMPILER))

    thread = threading.Thread(target=look)
    thread.start()
    try:
        for size in range(3, 6):
            jax.jit(lambda x: jnp.linalg.svd(jnp.sin(x) @ x)[0])(jnp.ones((size, size)))
    finally:
        is_done.set()
        thread.join()
    assert any(seen)
    assert not _ending.is_in(_ending.COMPILER)


def test_tracing_and_lowering_make_a_program():
    import jax

    seen = []

    def traced(x):
        seen.append(_ending.is_in(_ending.MAKERS, threading.get_ident()))
        return x

    jax.jit(traced)(1.0)
    assert seen == [True]
    assert not _ending.is_in(_ending.MAKERS, threading.get_ident())


def test_a_debugger_is_told_by_the_stack():
    import bdb

    seen = []
    debugger = bdb.Bdb()
    debugger.runcall(lambda: seen.append(_ending.is_in(_ending.DEBUGGER)))

    assert seen == [True]
    assert not _ending.is_in(_ending.DEBUGGER, threading.get_ident())
