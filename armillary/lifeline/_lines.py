"""Finds the line at which a thread is, for messages about a program that is stuck.

The thread that asks runs next to a main thread that may be anywhere, so a stack is read
in one call of a C function.
"""

import functools
import gc
import itertools
import linecache
import operator
import os
import sys
import sysconfig
import threading
from collections.abc import Callable
from typing import Any, NamedTuple, cast

from armillary._owners import is_library_file

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
# XLA's compiler, and the files that trace, examine and lower a program before it.
COMPILER = (os.path.join("jax", "_src", "compiler.py"),)
MAKERS = (
    *COMPILER,
    os.path.join("jax", "_src", "interpreters", "partial_eval.py"),
    os.path.join("jax", "_src", "interpreters", "mlir.py"),
    os.path.join(_PACKAGE, "distribute", "program", "_trace.py"),
)
_STDLIB = sysconfig.get_path("stdlib")
DEBUGGER = tuple(os.path.join(_STDLIB, name) for name in ("bdb.py", "pdb.py", "cmd.py"))
PROGRAMS = (os.path.join(_STDLIB, "subprocess.py"),)
_MAX_LINES = 4


class Line(NamedTuple):
    """The line at which one function of a stack is."""

    file: str
    number: int  # 0 if the function has only begun.
    function: str


def find_line(phase: str, stack: list[Line] | None = None) -> str:
    """Returns the innermost line of the user's code in the main thread.

    If the main thread waits for data, the lines of other threads are added, because one
    of them may read the data.
    """
    main = read_stack() if stack is None else stack
    if not main:
        return "(the main thread has ended)"

    innermost = _find_users(main) or main[0]
    lines = [_describe_line(innermost)]
    if phase in ("data", "evaluating"):
        others = map(_describe_line, _find_lines_of_others())
        # Several threads may be at one line.
        for line in dict.fromkeys(others):
            lines.append(f"while a thread reads ahead at {line}")
    return ", ".join(lines[:_MAX_LINES])


def _find_lines_of_others() -> list[Line]:
    """Returns the innermost line of the user's code in each thread but the main one."""
    read_idents = map(set, iter(sys._current_frames, None)).__next__
    idents: set[int] = _at_once(read_idents)
    idents.discard(threading.main_thread().ident or 0)
    lines: list[Line] = []
    for ident in idents:
        line = _find_users(read_stack(ident))
        if line is not None:
            lines.append(line)
    return lines


def is_in(files: tuple[str, ...], stack: list[Line]) -> bool:
    """Returns whether a stack goes through some files."""
    return any(line.file.endswith(files) for line in stack)


def read_stack(thread: int | None = None) -> list[Line]:
    """Returns the stack of a thread, innermost line first.

    Args:
        thread: The `ident` of the thread; `None` for the main thread.
    """
    ident = thread or threading.main_thread().ident
    # These iterators are built of C functions, so that no Python function runs, and no
    # other thread continues, while `_at_once` reads them. The first value is the
    # innermost frame, and each `getattr(frame, "f_back")` makes the next one.
    # `_current_frames` is called only once, because it calls audit hooks, too.
    once = itertools.islice(iter(sys._current_frames, None), 1)
    innermost = map(dict.get, once, [ident])
    steps = itertools.chain(innermost, itertools.repeat("f_back"))
    outward = itertools.accumulate(steps, cast(Any, getattr))
    frames = itertools.takewhile(bool, outward)

    if sys.version_info < (3, 12):
        places = map(operator.attrgetter("f_code", "f_lineno"), frames)
        stack = _at_once(functools.partial(list, places))
    else:
        # ORDER: all line numbers are read before the first `f_code`. Reading `f_code`
        # calls audit hooks, such as the hook of filelock 4.3, and another thread may
        # continue in them.
        frames, same_frames = itertools.tee(frames)
        numbers = map(operator.attrgetter("f_lineno"), same_frames)
        pairs = zip(frames, numbers, strict=True)
        held = _at_once(functools.partial(list, pairs))
        stack = [(frame.f_code, number) for frame, number in held]
    return [Line(code.co_filename, line or 0, code.co_name) for code, line in stack]


def _at_once(read: Callable[[], Any]) -> Any:
    """Calls a C function while no other thread runs.

    Otherwise CPython 3.11 crashed now and then, if a frame ended while it was read.
    `faulthandler` crashed if a thread began.
    """
    off: Any = int
    on: Any = int
    if gc.isenabled():
        off = gc.disable
        on = gc.enable
    # ORDER: all three functions run in one call. The garbage collector calls Python
    # functions, in which another thread may continue.
    calls: list[Any] = [off, read, on]
    try:
        _, found, _ = list(map(operator.call, calls))
    except BaseException:
        on()
        raise
    return found


def _find_users(stack: list[Line]) -> Line | None:
    """Returns the innermost line that is not in a library."""
    for line in stack:
        if not is_library_file(line.file):
            return line
    return None


def _describe_line(line: Line) -> str:
    """Returns the place of a line, and its text if the file can be read."""
    text = linecache.getline(line.file, line.number).strip()
    place = f"{line.file}:{line.number} in {line.function}"
    return f"{place}: {text}" if text else place
