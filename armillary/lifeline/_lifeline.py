"""One thread in each process, which listens to the others and may end the process."""

import asyncio
import atexit
import contextlib
import math
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from armillary._process import ExitCode
from armillary.lifeline._ending import end_process, find_line, is_compiling, leave
from armillary.lifeline._link import Link

_BEAT_SECONDS = 1.0
_FLUSH_SECONDS = 1.0
_FAILURE_SECONDS = 5.0
"""How long the others may take to notice a failure by themselves."""
_FRESH_SECONDS = 10.0
_SILENT_SECONDS = 3.0
"""Three reports that did not come: less than any sensible `hang_timeout_seconds`."""
_CHIEF = 0


class Place(NamedTuple):
    """Where a program is, as far as its loops tell."""

    phase: str  # Such as `"data"` or `"step"`.
    moves: int  # It changes whenever the program goes on.


_OUTSIDE = Place("outside of loops", 0)


class Report(NamedTuple):
    """The report that a process sends every second."""

    phase: str
    line: str
    quiet_seconds: float
    limit_seconds: float | None = None  # `None` in no loop that is watched.
    is_compiling: bool = False
    has_ended: bool = False


class Sighting(NamedTuple):
    """A report, and when it arrived, by the clock of this process."""

    report: Report
    time: float

    def quiet_seconds(self, now: float) -> float:
        """Returns how long the process has not gone on, as far as is known."""
        return self.report.quiet_seconds + now - self.time

    def describe(self, now: float) -> str:
        """Returns where the process is, and since when."""
        if self.report.has_ended:
            return "has reached the end of its program"
        phase = "compiling" if self.report.is_compiling else self.report.phase
        text = f"{phase} for {self.quiet_seconds(now):.0f} s, at {self.report.line}"
        silent = now - self.time
        if silent > _SILENT_SECONDS:
            text += f"; it has not answered for {silent:.0f} s (stopped?)"
        return text


def see_start(now: float) -> Sighting:
    """Returns what is known of a process that has just joined."""
    return Sighting(Report("start", "a line that it has not told", 0.0), now)


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
    who, advice = "The program has not", "Look at this line"
    if count > 1:
        who = "No process has"
        advice = "Look at the one that does not wait for another one"
    places = "\n".join(
        f"  process {index} of {count}: {seen.describe(now)}"
        for index, seen in sightings.items()
    )
    return (
        f"{who} gone on for {min(limits):g} seconds (`hang_timeout_seconds`):\n"
        f"{places}\n"
        f"{advice}, or allow more time with a larger `hang_timeout_seconds`: it must "
        "exceed the longest loop, evaluation, save and action."
    )


class Lifeline:
    """Watches over the processes of a job, or over one process that is alone."""

    def __init__(
        self,
        index: int = 0,
        count: int = 1,
        link: Link | None = None,
        end: Callable[[str], None] = end_process,
    ) -> None:
        self.verdict: str | None = None
        self._index, self._count = index, count
        self._link, self._end = link, end
        # Process 0 hears of all, the others of process 0. All have joined, or this
        # process would not be here.
        known = range(count) if index == _CHIEF else (_CHIEF, index)
        self._sightings = dict.fromkeys(known, see_start(time.monotonic()))
        self._failures: dict[int, tuple[str, float]] = {}
        self._limit: float | None = None
        self._find_place: Callable[[], Place] = lambda: _OUTSIDE
        self._place, self._moved_at = _OUTSIDE, time.monotonic()
        self._has_ended = self._has_failed = False
        self._has_verdict, self._is_open = threading.Event(), threading.Event()
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_done = asyncio.Event()

    def start(self) -> None:
        """Starts to watch, unless it does already."""
        if self._thread is None:
            self._loop = asyncio.new_event_loop()
            self._thread = threading.Thread(
                target=self._run, name="armillary-lifeline", daemon=True
            )
            self._thread.start()
            self._is_open.wait(_FLUSH_SECONDS)
            if self._link is not None:
                # JAX's own end of the program, where it waits for the others, was
                # registered before, and so comes later.
                atexit.register(self._tell_how_it_ends)

    @contextlib.contextmanager
    def watching(
        self, limit_seconds: float | None, find_place: Callable[[], Place]
    ) -> Iterator[None]:
        """Tells what the program does, and ends it if that takes too long."""
        before = self._limit, self._find_place
        # ORDER: the limit counts from the first look at the new place.
        self._moved_at = time.monotonic()
        self._limit, self._find_place = limit_seconds, find_place
        if limit_seconds is not None:
            self.start()
            # At once: if it is stopped now, the others know where.
            self._tell({"report": self._report(time.monotonic())})
        try:
            yield
        finally:
            self._limit, self._find_place = before

    def tell_failure(self, text: str) -> None:
        """Tells the others why this process is about to end."""
        if not self._has_failed:
            self._has_failed = True
            self._tell({"failure": text})

    def tell_end(self) -> None:
        """Tells the others that this process has come to the end of its program."""
        self._has_ended = True
        self._tell({"report": self._report(time.monotonic())})

    def has_ended(self, index: int) -> bool:
        """Returns whether a process has reported the end of its program."""
        return self._sightings[index].report.has_ended

    def wait_for_verdict(self, timeout_seconds: float) -> str | None:
        """Returns why the job ends, if that is known in time."""
        if self._link is not None and self._thread is not None:
            self._has_verdict.wait(timeout_seconds)
        return self.verdict

    def close(self) -> None:
        """Sends the last reports, then ends the thread and the connections."""
        self._call(self._is_done.set)
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(_FLUSH_SECONDS + 2 * _BEAT_SECONDS)

    def _call(self, function: Callable[..., Any], *arguments: Any) -> None:
        """Calls a function in the thread, after what was called there before."""
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # The loop is closed.
                self._loop.call_soon_threadsafe(function, *arguments)

    def _tell(self, message: dict[str, Any]) -> None:
        if self._link is not None:
            self._call(self._link.send, message)

    def _tell_how_it_ends(self) -> None:
        error = getattr(sys, "last_value", None)
        if error is not None:
            self.tell_failure(f"{type(error).__name__}: {error}")
        if not self._has_failed:
            self.tell_end()
        is_sent = threading.Event()
        self._call(is_sent.set)
        is_sent.wait(_FLUSH_SECONDS)

    def _run(self) -> None:
        assert self._loop is not None
        with contextlib.closing(self._loop):
            self._loop.run_until_complete(self._watch())

    async def _watch(self) -> None:
        if self._link is not None:
            await self._link.open(self._note)
        self._is_open.set()
        while not self._is_done.is_set():
            self._beat(time.monotonic())
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._is_done.wait(), _BEAT_SECONDS)
        if self._link is not None:
            if self.verdict is not None and self._index == _CHIEF:
                self._link.send({"verdict": self.verdict})
            await self._link.flush(_FLUSH_SECONDS)
        if self.verdict is not None:
            self._has_verdict.set()
            if self._has_failed:
                # The others ended because of this process, which has said why.
                leave(ExitCode.FAILED)
            self._end(self.verdict)
        if self._link is not None:
            await self._link.close()

    def _beat(self, now: float) -> None:
        """Reports, and looks whether anything goes on anywhere."""
        own = self._report(now)
        self._sightings[self._index] = Sighting(own, now)
        if self._link is not None:
            self._link.send({"report": own})
        for index, (failure, at) in self._failures.items():
            if now > at + _FAILURE_SECONDS:
                self._conclude(f"{self._name(index)} has failed: {failure}")
        # Process 0 decides for all, unless it is itself stopped.
        silent = now - self._sightings[_CHIEF].time
        limit = math.inf if self._limit is None else self._limit
        if self._index == _CHIEF or silent >= limit + 3 * _BEAT_SECONDS:
            text = find_hang(self._sightings, self._count, now)
            if text is not None:
                self._conclude(text)

    def _report(self, now: float) -> Report:
        place = self._find_place()
        if place != self._place:
            self._place, self._moved_at = place, now
        return Report(
            phase=place.phase,
            line=find_line(place.phase),
            quiet_seconds=now - self._moved_at,
            limit_seconds=self._limit,
            is_compiling=is_compiling(),
            has_ended=self._has_ended,
        )

    def _note(self, index: int, message: dict[str, Any] | None) -> None:
        """Takes in the report of a process; `None` is the end of its connection."""
        now = time.monotonic()
        if message is None:
            if index in self._failures or self.has_ended(index):
                return
            report = self._sightings[index].report
            self._conclude(
                f"{self._name(index)} is gone ({report.phase}, {report.line}). It was "
                "killed, has crashed, or its machine or network is down: its own "
                "output may tell more."
            )
        elif "report" in message:
            self._sightings[index] = Sighting(Report(*message["report"]), now)
        elif "failure" in message:
            self._failures[index] = str(message["failure"]), now
        elif "verdict" in message:
            self._conclude(str(message["verdict"]))

    def _name(self, index: int) -> str:
        return f"Process {index} of {self._count}"

    def _conclude(self, text: str) -> None:
        if self.verdict is None:
            self.verdict = text
            self._is_done.set()


_current: Lifeline | None = None


def get_lifeline() -> Lifeline:
    """Returns the lifeline of this process; one that is alone has its own."""
    global _current
    if _current is None:
        _current = Lifeline()
    return _current


def set_lifeline(lifeline: Lifeline) -> None:
    """Makes a lifeline that of this process."""
    global _current
    _current = lifeline
