"""Finds the place and the time limit of a process, and ends a process that is stuck.

A second thread runs this code, because the main thread may wait in C code forever,
where no exception reaches it.
"""

import atexit
import contextlib
import ctypes
import functools
import gc
import itertools
import linecache
import math
import operator
import os
import signal
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, cast

from armillary._launcher import tell
from armillary._owners import is_library_file
from armillary._process import ExitCode, get_process
from armillary.lifeline._watchdog import Watchdog

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
_PROGRAMS = (os.path.join(_STDLIB, "subprocess.py"),)
_SILENT_SECONDS = 3.0
"""The time of three missing reports, less than any sensible `hang_timeout_seconds`."""
_LEAST_SECONDS, _TIMES_LONGEST = 300.0, 5.0
_WORK_SECONDS = 3.0
"""The processor time that counts as progress, if the user has set no limit."""
_TIMER_SECONDS = 10.0
"""The time from the limit to the end of a process whose interpreter does not run."""
_UNWIND_SECONDS = 3.0
_FINISH_SECONDS = 8.0
_PAUSE_SECONDS = 0.05
_MOST_LINES = 4

OUTSIDE, START, JOIN, END = "outside of loops", "start_up", "joining", "ending"
_DEVICE_PHASES = ("stepping", "evaluating")

_unfinished: list[Callable[[], bool]] = []
_watchdog = Watchdog()
_is_ending, _has_said = False, threading.Event()


class Report(NamedTuple):
    """The report that a process sends to the others every second."""

    phase: str  # Such as `"data"` or `"step"`.
    line: str
    quiet_seconds: float
    limit_seconds: float | None = None  # `None` for no limit.
    has_ended: bool = False


class Sighting(NamedTuple):
    """A report, and the time of its arrival by the clock of this process."""

    report: Report
    time: float
    by: int | None = None  # A silent process that should have passed the report on.

    def is_silent(self, now: float) -> bool:
        """Returns whether no report has arrived for some seconds."""
        return now - self.time > _SILENT_SECONDS

    def quiet_seconds(self, now: float) -> float:
        """Returns the seconds without known progress of the process."""
        return self.report.quiet_seconds + now - self.time

    def describe(self, now: float) -> str:
        """Returns the place of the process, and the time that it has spent there."""
        if self.report.has_ended:
            return "has reached the end of its program"
        phase, line, *_ = self.report
        text = f"{phase} for {self.quiet_seconds(now):.0f} s, at {line}"
        if self.is_silent(now):
            why = "stopped?" if self.by is None else f"as process {self.by} has not"
            text += f"; it has not answered for {now - self.time:.0f} s ({why})"
        return text


class Place(NamedTuple):
    """The phase in which a program is, as its loops report it."""

    phase: str
    moves: int = 0  # It changes whenever the program makes progress.


class Line(NamedTuple):
    """The line at which one function of a stack is."""

    file: str
    number: int  # 0 if the function has only begun.
    function: str


class Pace:
    """The time that a program has spent at its present place, and the limit for it."""

    def __init__(self, now: float) -> None:
        self.place = Place(OUTSIDE)
        self.began = now
        self._worked_at = now
        self._work_seconds = 0.0
        self._longest: dict[str, float] = {}

    def look(self, place: Place, work_seconds: float, now: float) -> None:
        """Records the place of the program and its processor time at one moment."""
        is_other = place != self.place
        if is_other:
            phase = self.place.phase
            seconds = now - self.began
            self._longest[phase] = max(seconds, self._longest.get(phase, 0.0))
            self.place = place
            self.began = now
        if is_other or work_seconds - self._work_seconds >= _WORK_SECONDS:
            self._worked_at = now
            self._work_seconds = work_seconds

    def restart(self, now: float) -> None:
        """Counts the time at this place from now on."""
        self.began = self._worked_at = now

    def skip(self, seconds: float) -> None:
        """Leaves out a time in which the whole process was stopped."""
        self.began += seconds
        self._worked_at += seconds

    @property
    def busy_seconds(self) -> float:
        """The seconds at this place until the last sign of processor work."""
        return self._worked_at - self.began

    def find_limit(self, rule: float | None) -> float:
        """Returns the limit for idle time at this place.

        Args:
            rule: The limit that the user has set; `None` if there is none.
        """
        if rule is not None:
            return rule
        longest = self._longest.get(self.place.phase, 0.0)
        return max(_LEAST_SECONDS, _TIMES_LONGEST * longest)


def find_hang(sightings: Mapping[int, Sighting], count: int, now: float) -> str | None:
    """Returns the message if no process makes progress any more, else `None`."""
    # While one process makes progress, or is within its limit, the others have a reason
    # to wait. A process at the end of its program is no such reason.
    seen = sightings.values()
    running = [each for each in seen if not each.report.has_ended] or seen
    limits = [each.report.limit_seconds for each in running]
    least = min((limit for limit in limits if limit is not None), default=math.inf)
    for each, limit in zip(running, limits, strict=True):
        # A process that is silent for so long is stopped, whatever its limit is.
        is_stopped = now - each.time >= least
        if not is_stopped and (limit is None or each.quiet_seconds(now) < limit):
            return None
    places = "\n".join(
        f"  process {index} of {count}: {each.describe(now)}"
        for index, each in sightings.items()
    )
    return (
        f"No process has made progress for {least:.4g} seconds:\n{places}\n"
        "Look at the process that does not wait for another one, or allow more time: "
        "`hang_timeout_seconds` of the `Controller` must exceed the longest loop, "
        "evaluation, save and action. By default, it is five times the longest so "
        f"far, and at least {_LEAST_SECONDS:g} seconds."
    )


def has_company(phase: str, stack: list[Line]) -> bool:
    """Returns whether a person may be at work, or a program that this one started."""
    if hasattr(sys, "ps1") or "pydevd" in sys.modules or is_in(DEBUGGER, stack):
        return True
    return phase == START and is_in(_PROGRAMS, stack)


def waits_for_itself(phase: str) -> bool:
    """Returns whether a program that is alone waits for code or data of its own.

    Then no other process waits for it, and it may take any time, for example for an
    upload after a loop, or for slow data. Devices may hang, so a program that waits for
    them is watched.
    """
    return phase not in _DEVICE_PHASES


def read_work_seconds(phase: str, thread: threading.Thread | None = None) -> float:
    """Returns the processor time that the program has used, in seconds.

    While a thread waits for devices, only its own time counts: other threads may wait
    for them in a loop.
    """
    if phase in _DEVICE_PHASES:
        native_id = (thread or threading.main_thread()).native_id
        stat = Path(f"/proc/self/task/{native_id}/stat")
        with contextlib.suppress(OSError):  # Not on macOS, or the thread has ended.
            return _read_work(stat)
    return time.process_time() + _read_work_of_children()


def _read_work(stat: Path) -> float:
    """Returns the processor time of a process or thread, in seconds."""
    fields = stat.read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")


def _read_work_of_children() -> float:
    """Returns the processor time of the processes that this one has started."""
    seconds = sum(os.times()[2:4])
    for path in Path("/proc/self/task").glob("*/children"):
        with contextlib.suppress(OSError):  # The thread or a child has ended.
            for child in path.read_text().split():
                seconds += _read_work(Path("/proc", child, "stat"))
    return seconds


def set_timer(limit_seconds: float) -> None:
    """Ends this process after its limit, with all stacks, unless it is set again."""
    _watchdog.set_limit(limit_seconds + _TIMER_SECONDS, str(get_process()))


def find_line(phase: str, stack: list[Line] | None = None) -> str:
    """Returns the innermost line of the user's code in the main thread.

    If the main thread waits for data, the lines of other threads are added, because one
    of them may read the data.
    """
    main = read_stack() if stack is None else stack
    if not main:
        return "(the main thread has ended)"
    lines = [_describe(_find_users(main) or main[0])]
    idents: set[int] = set()
    if phase in ("data", "evaluating"):
        idents = _at_once(map(set, iter(sys._current_frames, None)).__next__)
    users = map(_find_users, map(read_stack, idents - {threading.main_thread().ident}))
    others = dict.fromkeys(_describe(line) for line in users if line is not None)
    lines += [f"while a thread reads ahead at {line}" for line in others]
    return ", ".join(lines[:_MOST_LINES])


def is_in(files: tuple[str, ...], stack: list[Line]) -> bool:
    """Returns whether a stack goes through some files."""
    return any(line.file.endswith(files) for line in stack)


def read_stack(thread: int | None = None) -> list[Line]:
    """Returns the stack of a thread, innermost line first.

    Args:
        thread: The `ident` of the thread; `None` for the main thread.
    """
    ident = thread or threading.main_thread().ident
    # `_current_frames` is called only once, because it calls audit hooks, too.
    once = itertools.islice(iter(sys._current_frames, None), 1)
    found = map(dict.get, once, [ident])
    steps = itertools.chain(found, itertools.repeat("f_back"))
    outward = itertools.accumulate(steps, cast(Any, getattr))
    frames = itertools.takewhile(bool, outward)
    if sys.version_info < (3, 12):
        places = map(operator.attrgetter("f_code", "f_lineno"), frames)
        stack = _at_once(functools.partial(list, places))
    else:
        # ORDER: all line numbers are read before the first `f_code`. Reading `f_code`
        # calls audit hooks, such as the hook of filelock 4.3, and another thread may
        # continue in them.
        frames, same = itertools.tee(frames)
        pairs = zip(frames, map(operator.attrgetter("f_lineno"), same), strict=True)
        held = _at_once(functools.partial(list, pairs))
        stack = [(frame.f_code, line) for frame, line in held]
    return [Line(code.co_filename, line or 0, code.co_name) for code, line in stack]


def _at_once(read: Callable[[], Any]) -> Any:
    """Calls a C function while no other thread runs.

    Otherwise CPython 3.11 crashed now and then, if a frame ended while it was read.
    `faulthandler` crashed if a thread began.
    """
    # ORDER: all three functions run in one call. The garbage collector calls Python
    # functions, in which another thread may continue.
    off, on = (gc.disable, gc.enable) if gc.isenabled() else (int, int)
    calls: list[Any] = [off, read, on]
    try:
        _, found, _ = list(map(operator.call, calls))
    except BaseException:
        on()
        raise
    return found


def _find_users(stack: list[Line]) -> Line | None:
    return next((line for line in stack if not is_library_file(line.file)), None)


def _describe(line: Line) -> str:
    text = linecache.getline(line.file, line.number).strip()
    place = f"{line.file}:{line.number} in {line.function}"
    return f"{place}: {text}" if text else place


def finish_first(is_busy: Callable[[], bool]) -> None:
    """Delays the end of the process, for some seconds, while `is_busy()` is true."""
    _unfinished.append(is_busy)


def end_process(reason: str) -> None:
    """Prints the reason, and ends this process with `ExitCode.RESTART_REQUESTED`."""
    global _is_ending
    _is_ending = True
    tell("failed", reason[:1000])
    code = ExitCode.RESTART_REQUESTED
    who = get_process()
    ends = f"ends with exit code {code.value} ({code.name})."
    text = f"ERROR: {who}: {reason}\n{who}: {ends}\n"
    # The logger is not used, because a stuck main thread may hold its lock.
    with contextlib.suppress(OSError):
        os.write(2, text.encode(errors="replace"))
    _has_said.set()
    start = time.monotonic()
    _wait(start + _UNWIND_SECONDS, threading.main_thread().is_alive)
    _wait(start + _FINISH_SECONDS, lambda: any(is_busy() for is_busy in _unfinished))
    leave(code)


def _wait(end: float, is_busy: Callable[[], bool]) -> None:
    while is_busy() and time.monotonic() < end:
        time.sleep(_PAUSE_SECONDS)


def leave(code: ExitCode) -> NoReturn:
    """Ends the process without exit functions; JAX's would wait for dead processes."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(code)


def put_off_aborts() -> None:
    """Makes an abort of this process wait for six seconds."""
    # When process 0 ends, JAX immediately aborts the others in C++, and does not name
    # it. The handler is `sleep` of the C library, which is safe in a signal handler.
    # Its argument is the number of the signal, 6.
    with contextlib.suppress(OSError, AttributeError):
        library = ctypes.CDLL(None)
        library.signal.argtypes = (ctypes.c_int, ctypes.c_void_p)
        library.signal.restype = ctypes.c_void_p
        # `None` is the handler in C that `PYTHONFAULTHANDLER` sets.
        if signal.getsignal(signal.SIGABRT) in (signal.SIG_DFL, None):
            sleep = ctypes.cast(library.sleep, ctypes.c_void_p)
            library.signal(signal.SIGABRT, sleep)


os.register_at_fork(after_in_child=_watchdog.let_go)


@atexit.register
def _leave_if_ending() -> None:
    if _is_ending:
        _has_said.wait(_UNWIND_SECONDS)
        leave(ExitCode.RESTART_REQUESTED)
