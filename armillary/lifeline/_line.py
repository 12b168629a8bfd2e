"""Which line of the user's program a thread is at."""

import functools
import linecache
import os
import sys
import sysconfig
import threading
from collections.abc import Iterator
from types import FrameType

from armillary._process import READER_THREADS

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_COMPILER = os.path.join("jax", "_src", "compiler.py")
# Where a program is made of Python: traced, looked at, and lowered.
_MAKERS = (
    _COMPILER,
    os.path.join("jax", "_src", "interpreters", "partial_eval.py"),
    os.path.join("jax", "_src", "interpreters", "mlir.py"),
    os.path.join(_PACKAGE, "distribute", "program", "_trace.py"),
)
_DEBUGGER = tuple(
    os.path.join(sysconfig.get_path("stdlib"), name)
    for name in ("bdb.py", "pdb.py", "cmd.py")
)


def find_line(phase: str) -> str:
    """Returns the innermost line of the user's code in the main thread.

    While data is waited for, also that of the threads that read it.
    """
    frames = sys._current_frames()
    main = frames.get(threading.main_thread().ident or 0)
    if main is None:
        return "(the main thread has ended)"
    lines = [_describe(_find_users(main) or main)]
    for thread in threading.enumerate() if phase == "data" else ():
        frame = frames.get(thread.ident or 0)
        if thread.name == READER_THREADS and frame is not None:
            user = _find_users(frame)
            if user is not None:
                lines.append(f"while a thread reads ahead at {_describe(user)}")
    return ", ".join(lines)


def is_compiling() -> bool:
    """Returns whether the main thread waits for XLA's compiler."""
    return _is_in((_COMPILER,), threading.main_thread().ident)


def is_making_program(thread: int) -> bool:
    """Returns whether a thread, by its `ident`, traces, lowers or compiles."""
    return _is_in(_MAKERS, thread)


def is_in_debugger(thread: int) -> bool:
    """Returns whether a thread, by its `ident`, is in or under Python's debugger."""
    return _is_in(_DEBUGGER, thread)


def _is_in(files: tuple[str, ...], thread: int | None) -> bool:
    frame = sys._current_frames().get(thread or 0)
    return any(each.f_code.co_filename.endswith(files) for each in _outward(frame))


def _find_users(frame: FrameType) -> FrameType | None:
    return next((each for each in _outward(frame) if _is_users(each)), None)


def _outward(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _is_users(frame: FrameType) -> bool:
    return _is_users_file(frame.f_code.co_filename)


@functools.cache
def _is_users_file(name: str) -> bool:
    if name.startswith("<"):
        return False
    parts = set(name.split(os.sep))
    return not (
        name.startswith((_PACKAGE + os.sep, sysconfig.get_path("stdlib") + os.sep))
        or parts & {"site-packages", "dist-packages"}
    )


def _describe(frame: FrameType) -> str:
    name, number = frame.f_code.co_filename, frame.f_lineno
    text = linecache.getline(name, number).strip()
    place = f"{name}:{number} in {frame.f_code.co_name}"
    return f"{place}: {text}" if text else place
