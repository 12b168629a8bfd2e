"""Says where a process is, whether a job is stuck, and ends what cannot go on.

Another thread does so: the main one may wait in C code for ever, where no exception
reaches it.
"""

import atexit
import contextlib
import ctypes
import linecache
import os
import signal
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from types import FrameType
from typing import NamedTuple, NoReturn

from armillary._launcher import tell
from armillary._process import READER_THREADS, ExitCode, get_process
from armillary._traceback import is_library_file

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
# XLA's compiler, and where a program is traced, looked at, and lowered before.
COMPILER = (os.path.join("jax", "_src", "compiler.py"),)
MAKERS = (
    *COMPILER,
    os.path.join("jax", "_src", "interpreters", "partial_eval.py"),
    os.path.join("jax", "_src", "interpreters", "mlir.py"),
    os.path.join(_PACKAGE, "distribute", "program", "_trace.py"),
)
DEBUGGER = tuple(
    os.path.join(sysconfig.get_path("stdlib"), name)
    for name in ("bdb.py", "pdb.py", "cmd.py")
)
_FRESH_SECONDS = 10.0
_SILENT_SECONDS = 3.0
"""Three reports that did not come: less than any sensible `hang_timeout_seconds`."""
_UNWIND_SECONDS = 3.0
_FINISH_SECONDS = 8.0
_PAUSE_SECONDS = 0.05

_unfinished: list[Callable[[], bool]] = []
_is_ending = False


class Report(NamedTuple):
    """What a process tells the others every second."""

    phase: str  # Such as `"data"` or `"step"`.
    line: str
    quiet_seconds: float
    limit_seconds: float | None = None  # `None` in no loop that is watched.
    is_compiling: bool = False
    has_ended: bool = False


class Sighting(NamedTuple):
    """A report, and when it arrived, by the clock of this process."""

    report: Report
    time: float
    by: int | None = None  # A process, silent too, by way of which it is heard of.

    def is_silent(self, now: float) -> bool:
        """Returns whether it has not been heard of for some seconds."""
        return now - self.time > _SILENT_SECONDS

    def quiet_seconds(self, now: float) -> float:
        """Returns how long the process has not gone on, as far as is known."""
        return self.report.quiet_seconds + now - self.time

    def describe(self, now: float) -> str:
        """Returns where the process is, and since when."""
        if self.report.has_ended:
            return "has reached the end of its program"
        phase = "compiling" if self.report.is_compiling else self.report.phase
        text = f"{phase} for {self.quiet_seconds(now):.0f} s, at {self.report.line}"
        if self.is_silent(now):
            why = "stopped?" if self.by is None else f"as process {self.by} has not"
            text += f"; it has not answered for {now - self.time:.0f} s ({why})"
        return text


def find_hang(sightings: Mapping[int, Sighting], count: int, now: float) -> str | None:
    """Returns what to say if no process has gone on for too long, else `None`."""
    # While one process goes on, or compiles, or is in no loop that is watched, the
    # others wait for it with good reason.
    running = [seen for seen in sightings.values() if not seen.report.has_ended]
    limits = [seen.report.limit_seconds for seen in running]
    limits = [limit for limit in limits if limit is not None]
    if not limits:
        return None
    for seen in running:
        # One that is silent is stopped, whatever it was about to do.
        if now - seen.time >= min(limits):
            continue
        limit = seen.report.limit_seconds
        if limit is None or seen.quiet_seconds(now) < limit:
            return None
        if seen.report.is_compiling and now - seen.time < _FRESH_SECONDS:
            return None
    places = "\n".join(
        f"  process {index} of {count}: {seen.describe(now)}"
        for index, seen in sightings.items()
    )
    return (
        f"No process has gone on for {min(limits):g} seconds "
        f"(`hang_timeout_seconds`):\n{places}\n"
        "Look at the one that does not wait for another one, or allow more time: "
        "`hang_timeout_seconds` must exceed the longest loop, evaluation, save and "
        "action."
    )


def find_line(phase: str) -> str:
    """Returns the innermost line of the user's code in the main thread."""
    frames = sys._current_frames()
    main = frames.get(threading.main_thread().ident or 0)
    if main is None:
        return "(the main thread has ended)"
    lines = [_describe(_find_users(main) or main)]
    for thread in threading.enumerate() if phase == "data" else ():
        if thread.name == READER_THREADS:
            user = _find_users(frames.get(thread.ident or 0))
            if user is not None:
                lines.append(f"while a thread reads ahead at {_describe(user)}")
    return ", ".join(lines)


def is_in(files: tuple[str, ...], thread: int | None = None) -> bool:
    """Returns whether a thread, by its `ident`, or the main one, is in some files."""
    frame = sys._current_frames().get(thread or threading.main_thread().ident or 0)
    return any(each.f_code.co_filename.endswith(files) for each in _outward(frame))


def _find_users(frame: FrameType | None) -> FrameType | None:
    frames = _outward(frame)
    return next((f for f in frames if not is_library_file(f.f_code.co_filename)), None)


def _outward(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _describe(frame: FrameType) -> str:
    name, number = frame.f_code.co_filename, frame.f_lineno
    text = linecache.getline(name, number).strip()
    place = f"{name}:{number} in {frame.f_code.co_name}"
    return f"{place}: {text}" if text else place


def finish_first(is_busy: Callable[[], bool]) -> None:
    """Lets the end of the process wait, for some seconds, while something is busy."""
    _unfinished.append(is_busy)


def end_process(reason: str) -> None:
    """Prints why, and ends this process with `ExitCode.RESTART_REQUESTED`."""
    global _is_ending
    tell("failed", reason[:1000])
    code = ExitCode.RESTART_REQUESTED
    who, ends = get_process(), f"ends with exit code {code.value} ({code.name})."
    text = f"ERROR: {who}: {reason}\n{who}: {ends}\n"
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
    """Ends the process now: at its end JAX would wait for those that are gone."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(code)


def put_off_aborts() -> None:
    """Makes an abort of this process wait for six seconds."""
    # When process 0 ends, JAX aborts the others at once, in C++, without a name. The
    # handler is the C library's `sleep`, which is safe there, called with the number
    # of the signal, which is 6.
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
