"""Decides when a process is stuck, and ends it.

A second thread runs this code, because the main thread may wait in C code forever,
where no exception reaches it.
"""

import atexit
import contextlib
import ctypes
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import NamedTuple, NoReturn

from armillary._launcher import notify_launcher
from armillary._process import ExitCode, get_process
from armillary.lifeline._lines import DEBUGGER, PROGRAMS, Line, is_in
from armillary.lifeline._watchdog import Watchdog

_SILENT_SECONDS = 3.0
"""The time of three missing reports, less than any sensible `hang_timeout_seconds`."""
# By default, the limit is a multiple of the longest time in the same phase so far.
_MIN_SECONDS = 300.0
_TIMES_LONGEST = 5.0
_WORK_SECONDS = 3.0
"""The processor time that counts as progress, if the user has set no limit."""
_TIMER_SECONDS = 10.0
"""The time from the limit to the end of a process whose interpreter does not run."""
_UNWIND_SECONDS = 3.0
"""The time for the main thread to end, so that the error of the user is shown."""
_FINISH_SECONDS = 8.0
"""The time for a save in progress, counted from the same moment."""
_PAUSE_SECONDS = 0.05
_ABORT_HANDLER = "sleep"
"""The function of the C library that an abort waits for. Its argument is the number of
the signal, 6."""
MAX_CHARACTERS = 1000
"""The most characters of an error that the launcher gets."""

OUTSIDE = "outside of loops"
START = "start_up"
JOIN = "joining"
END = "ending"
_DEVICE_PHASES = ("stepping", "evaluating")

_unfinished: list[Callable[[], bool]] = []
_watchdog = Watchdog()
_is_ending = False
_has_printed = threading.Event()


class Report(NamedTuple):
    """The report that a process sends to the others every second."""

    phase: str  # Such as `"data"` or `"step"`.
    line: str
    quiet_seconds: float
    limit_seconds: float | None = None  # `None` for no limit.
    has_ended: bool = False
    moved: str = ""  # The bytes of a save or a restore, if one is in progress.


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
        """Returns the phase of the process, and the time that it has spent there."""
        if self.report.has_ended:
            return "has reached the end of its program"
        quiet_seconds = self.quiet_seconds(now)
        text = f"{self.report.phase} for {quiet_seconds:.0f} s"
        if self.report.moved:
            text += f", with {self.report.moved}"
        text += f", at {self.report.line}"
        if self.is_silent(now):
            why = "stopped?" if self.by is None else f"as process {self.by} has not"
            text += f"; it has not answered for {now - self.time:.0f} s ({why})"
        return text


class Phase(NamedTuple):
    """The present work of a program, as its loops report it."""

    name: str
    moves: int = 0  # It changes whenever the program makes progress.
    num_bytes: int = 0  # The bytes that a save or a restore has moved.


class Pace:
    """The time that a program has spent in its present phase, and the limit for it."""

    def __init__(self, now: float) -> None:
        self.phase = Phase(OUTSIDE)
        self.began = now
        self._worked_at = now
        self._work_seconds = 0.0
        self._longest: dict[str, float] = {}

    def look(self, phase: Phase, work_seconds: float, now: float) -> None:
        """Records the phase of the program and its processor time at one moment."""
        has_moved = phase != self.phase
        if has_moved:
            name = self.phase.name
            seconds = now - self.began
            self._longest[name] = max(seconds, self._longest.get(name, 0.0))
            self.phase = phase
            self.began = now
        has_worked = work_seconds - self._work_seconds >= _WORK_SECONDS
        if has_moved or has_worked:
            self._worked_at = now
            self._work_seconds = work_seconds

    def restart(self, now: float) -> None:
        """Counts the time in this phase from now on."""
        self.began = self._worked_at = now

    def skip(self, seconds: float) -> None:
        """Leaves out a time in which the whole process was stopped."""
        self.began += seconds
        self._worked_at += seconds

    @property
    def busy_seconds(self) -> float:
        """The seconds in this phase until the last sign of processor work."""
        return self._worked_at - self.began

    def find_limit(self, rule: float | None) -> float:
        """Returns the limit for idle time in this phase.

        Args:
            rule: The limit that the user has set; `None` if there is none.
        """
        if rule is not None:
            return rule
        longest = self._longest.get(self.phase.name, 0.0)
        return max(_MIN_SECONDS, _TIMES_LONGEST * longest)


def find_hang(sightings: Mapping[int, Sighting], count: int, now: float) -> str | None:
    """Returns the message if no process makes progress any more, else `None`."""
    # While one process makes progress, or is within its limit, the others have a reason
    # to wait. A process at the end of its program is no such reason.
    seen = sightings.values()
    running = [sighting for sighting in seen if not sighting.report.has_ended]
    running = running or list(seen)
    least = _find_least_limit(running)
    for sighting in running:
        # A process that is silent for so long is stopped, whatever its limit is.
        is_stopped = now - sighting.time >= least
        limit = sighting.report.limit_seconds
        has_time = limit is None or sighting.quiet_seconds(now) < limit
        if has_time and not is_stopped:
            return None

    places = "\n".join(
        f"  process {index} of {count}: {sighting.describe(now)}"
        for index, sighting in sightings.items()
    )
    return (
        f"No process has made progress for {least:.4g} seconds:\n{places}\n"
        "Look at the process that does not wait for another one, or allow more time: "
        "`hang_timeout_seconds` of the `Controller` must exceed the longest loop, "
        "evaluation, save and action. By default, it is five times the longest so "
        f"far, and at least {_MIN_SECONDS:g} seconds."
    )


def find_stopped(sightings: Mapping[int, Sighting], now: float) -> list[int]:
    """Returns the processes that do not answer, although their messages could come."""
    stopped: list[int] = []
    for index, sighting in sightings.items():
        could_answer = sighting.by is None and not sighting.report.has_ended
        if could_answer and sighting.is_silent(now):
            stopped.append(index)
    return stopped


def _find_least_limit(sightings: Iterable[Sighting]) -> float:
    """Returns the least limit of some processes, infinite if none has a limit."""
    least = math.inf
    for sighting in sightings:
        limit = sighting.report.limit_seconds
        if limit is not None:
            least = min(least, limit)
    return least


def is_attended(phase: str, stack: list[Line]) -> bool:
    """Returns whether a person may be at work, or a program that this one started."""
    is_interactive = hasattr(sys, "ps1")
    is_debugged = "pydevd" in sys.modules or is_in(DEBUGGER, stack)
    if is_interactive or is_debugged:
        return True
    return phase == START and is_in(PROGRAMS, stack)


def waits_for_own_code(phase: str) -> bool:
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
    # The second field is the name of the program, in brackets, and may hold spaces.
    fields = stat.read_text().rpartition(")")[2].split()
    user_ticks, system_ticks = map(int, fields[11:13])
    return (user_ticks + system_ticks) / os.sysconf("SC_CLK_TCK")


def _read_work_of_children() -> float:
    """Returns the processor time of the processes that this one has started."""
    times = os.times()
    # Linux adds the time of a child here only when the child has ended.
    seconds = times.children_user + times.children_system
    for path in Path("/proc/self/task").glob("*/children"):
        with contextlib.suppress(OSError):  # The thread or a child has ended.
            for child in path.read_text().split():
                seconds += _read_work(Path("/proc", child, "stat"))
    return seconds


def set_timer(limit_seconds: float) -> None:
    """Ends this process after its limit, with all stacks, unless it is set again."""
    _watchdog.set_limit(limit_seconds + _TIMER_SECONDS, str(get_process()))


def finish_first(is_busy: Callable[[], bool]) -> None:
    """Delays the end of the process, for some seconds, while `is_busy()` is true."""
    _unfinished.append(is_busy)


def end_process(reason: str) -> None:
    """Prints the reason, and ends this process with `ExitCode.RESTART_REQUESTED`."""
    global _is_ending
    _is_ending = True
    notify_launcher("failed", reason[:MAX_CHARACTERS])
    code = ExitCode.RESTART_REQUESTED
    who = get_process()
    ends = f"ends with exit code {code.value} ({code.name})."
    text = f"ERROR: {who}: {reason}\n{who}: {ends}\n"
    # The logger is not used, because a stuck main thread may hold its lock.
    with contextlib.suppress(OSError):
        os.write(2, text.encode(errors="replace"))
    _has_printed.set()

    start = time.monotonic()
    _wait(start + _UNWIND_SECONDS, threading.main_thread().is_alive)
    _wait(start + _FINISH_SECONDS, _has_unfinished)
    leave(code)


def _has_unfinished() -> bool:
    return any(is_busy() for is_busy in _unfinished)


def _wait(end: float, is_busy: Callable[[], bool]) -> None:
    while is_busy() and time.monotonic() < end:
        time.sleep(_PAUSE_SECONDS)


def leave(code: ExitCode) -> NoReturn:
    """Ends the process without exit functions; JAX's would wait for dead processes."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(code)


def delay_aborts() -> None:
    """Makes an abort of this process wait for six seconds."""
    # When process 0 ends, JAX immediately aborts the others in C++, and does not name
    # it. The handler is a function of the C library that is safe in a signal handler.
    with contextlib.suppress(OSError, AttributeError):
        library = ctypes.CDLL(None)
        library.signal.argtypes = (ctypes.c_int, ctypes.c_void_p)
        library.signal.restype = ctypes.c_void_p
        # `None` is the handler in C that `PYTHONFAULTHANDLER` sets.
        if signal.getsignal(signal.SIGABRT) in (signal.SIG_DFL, None):
            handler = ctypes.cast(getattr(library, _ABORT_HANDLER), ctypes.c_void_p)
            library.signal(signal.SIGABRT, handler)


os.register_at_fork(after_in_child=_watchdog.release_in_child)


@atexit.register
def _leave_if_ending() -> None:
    if _is_ending:
        _has_printed.wait(_UNWIND_SECONDS)
        leave(ExitCode.RESTART_REQUESTED)
