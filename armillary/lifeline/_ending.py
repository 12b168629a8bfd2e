"""Ends a process that cannot go on, from another thread than the main one.

The main thread may wait in C code for ever, where no exception reaches it.
"""

import atexit
import contextlib
import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import NoReturn

from armillary._exit_code import ExitCode
from armillary._process import get_process

_UNWIND_SECONDS = 3.0
_FINISH_SECONDS = 8.0
_PAUSE_SECONDS = 0.05

_unfinished: list[Callable[[], bool]] = []
_is_ending = False


def finish_first(is_busy: Callable[[], bool]) -> None:
    """Lets the end of the process wait, for some seconds, while something is busy."""
    _unfinished.append(is_busy)


def end_process(reason: str) -> None:
    """Prints why, and ends this process with `ExitCode.RESTART_REQUESTED`.

    The main thread gets a few seconds to come to an end by itself, since it may have
    noticed something too, and so does what is being saved.
    """
    global _is_ending
    code = ExitCode.RESTART_REQUESTED
    process = get_process()
    who = f"{process}: " if process.count > 1 else ""
    text = (
        f"ERROR: {who}{reason}\n{who or 'The program '}ends with exit code "
        f"{code.value} ({code.name}).\n"
    )
    # Not the logger: the main thread may be stuck while it holds its lock.
    with contextlib.suppress(OSError):
        os.write(2, text.encode(errors="replace"))
    _is_ending = True
    start = time.monotonic()
    _wait(start + _UNWIND_SECONDS, threading.main_thread().is_alive)
    _wait(start + _FINISH_SECONDS, lambda: any(is_busy() for is_busy in _unfinished))
    leave(code)


def _wait(end: float, is_busy: Callable[[], bool]) -> None:
    while is_busy() and time.monotonic() < end:
        time.sleep(_PAUSE_SECONDS)


def leave(code: ExitCode) -> NoReturn:
    """Ends the process now, without what Python and JAX do at the end of a program.

    JAX would wait there for processes that are gone.
    """
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(code)


def put_off_aborts() -> None:
    """Makes an abort of this process wait for six seconds.

    When process 0 ends, or a new process takes the place of one that is gone, JAX
    aborts the others at once, in C++, and does not say which process it was. Six
    seconds are enough to say it, and to end with the right exit code.

    The handler is the function `sleep` of the C library, which is safe to call in a
    signal handler. Its argument is the number of the signal, which is 6 for SIGABRT.
    """
    with contextlib.suppress(OSError, AttributeError):
        library = ctypes.CDLL(None)
        library.signal.argtypes = (ctypes.c_int, ctypes.c_void_p)
        library.signal.restype = ctypes.c_void_p
        if signal.getsignal(signal.SIGABRT) == signal.SIG_DFL:
            sleep = ctypes.cast(library.sleep, ctypes.c_void_p)
            library.signal(signal.SIGABRT, sleep)


@atexit.register
def _leave_if_ending() -> None:
    if _is_ending:
        leave(ExitCode.RESTART_REQUESTED)
