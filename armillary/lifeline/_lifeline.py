"""One thread in each process, which listens to the others and may end the process.

Process 0 and the others tell each other what they do.
"""

import asyncio
import atexit
import contextlib
import math
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from armillary._process import ExitCode
from armillary.lifeline._ending import (
    COMPILER,
    Report,
    Sighting,
    end_process,
    find_hang,
    find_line,
    is_in,
    leave,
)
from armillary.lifeline._tree import Tree

_BEAT_SECONDS = 1.0
_START_SECONDS = _SEND_SECONDS = 1.0
_FAILURE_SECONDS = 5.0
"""How long the others may take to notice a failure by themselves."""
_CHIEF = 0


class Place(NamedTuple):
    """Where a program is, as far as its loops tell."""

    phase: str
    moves: int  # It changes whenever the program goes on.


_OUTSIDE = Place("outside of loops", 0)


class Lifeline:
    """Watches over the processes of a job, or over one process that is alone."""

    def __init__(
        self,
        index: int = 0,
        count: int = 1,
        endpoint: socket.socket | None = None,
        token: str = "",
    ) -> None:
        self.verdict: str | None = None
        self._index, self._count = index, count
        self._tree = None
        if endpoint is not None:
            self._tree = Tree(index, endpoint, token, self._note)
        # Process 0 hears of all, the others of process 0. All have joined, or this
        # process would not be here.
        known = range(count) if index == _CHIEF else (_CHIEF, index)
        start = Report("start", "a line that it has not told", 0.0)
        self._sightings = dict.fromkeys(known, Sighting(start, time.monotonic()))
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
            self._thread = threading.Thread(
                target=lambda: asyncio.run(self._watch()),
                name="armillary-lifeline",
                daemon=True,
            )
            self._thread.start()
            self._is_open.wait(_START_SECONDS)
            if self._tree is not None:
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

    def tell_failure(self, error: BaseException) -> None:
        """Tells the others why this process is about to end."""
        if not self._has_failed:
            self._has_failed = True
            self._tell({"failure": f"{type(error).__name__}: {error}"})

    def tell_end(self) -> None:
        """Tells the others that this process has come to the end of its program."""
        self._has_ended = True
        self._tell({"report": self._report(time.monotonic())})

    def has_ended(self, index: int) -> bool:
        """Returns whether a process has reported the end of its program."""
        return self._sightings[index].report.has_ended

    def wait_for_verdict(self, timeout_seconds: float) -> str | None:
        """Returns why the job ends, if that is known in time."""
        if self._tree is not None:
            self._has_verdict.wait(timeout_seconds)
        return self.verdict

    def _call(self, function: Callable[..., Any], *arguments: Any) -> None:
        """Calls a function in the thread, after what was called there before."""
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # The loop is closed.
                self._loop.call_soon_threadsafe(function, *arguments)

    def _tell(self, message: dict[str, Any]) -> None:
        self._call(self._send, message)

    def _tell_how_it_ends(self) -> None:
        error = getattr(sys, "last_value", None)
        if error is not None:
            self.tell_failure(error)
        if not self._has_failed:
            self.tell_end()
        is_sent = threading.Event()
        self._call(is_sent.set)
        is_sent.wait(_SEND_SECONDS)

    def _send(self, message: dict[str, Any]) -> None:
        if self._tree is not None:
            self._tree.send(message)

    async def _watch(self) -> None:
        self._loop = asyncio.get_running_loop()
        if self._tree is not None:
            await self._tree.open()
        self._is_open.set()
        while not self._is_done.is_set():
            self._beat(time.monotonic())
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._is_done.wait(), _BEAT_SECONDS)
        if self.verdict is not None:
            if self._index == _CHIEF:
                self._send({"verdict": self.verdict})
            self._has_verdict.set()
            if self._has_failed:
                # The others ended because of this process, which has said why.
                leave(ExitCode.FAILED)
            end_process(self.verdict)
        if self._tree is not None:
            self._tree.close()

    def _beat(self, now: float) -> None:
        """Reports, and looks whether anything goes on anywhere."""
        own = self._report(now)
        self._sightings[self._index] = Sighting(own, now)
        self._send({"report": own})
        for index, (failure, at) in self._failures.items():
            if now > at + _FAILURE_SECONDS:
                self._conclude(
                    f"Process {index} of {self._count} has failed: {failure}"
                )
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
            is_compiling=is_in(COMPILER),
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
                f"Process {index} of {self._count} is gone ({report.phase}, "
                f"{report.line}). It was killed, has crashed, or its machine or "
                "network is down: its own output may tell more."
            )
        elif "report" in message:
            self._sightings[index] = Sighting(Report(*message["report"]), now)
        elif "failure" in message:
            self._failures[index] = str(message["failure"]), now
        elif "verdict" in message:
            self._conclude(str(message["verdict"]))

    def _conclude(self, text: str) -> None:
        if self.verdict is None:
            self.verdict = text
            self._is_done.set()


_current = Lifeline()  # One that is alone has its own.


def get_lifeline() -> Lifeline:
    """Returns the lifeline of this process."""
    return _current


def set_lifeline(lifeline: Lifeline) -> None:
    """Makes a lifeline that of this process."""
    global _current
    _current = lifeline


def _let_go_in_child() -> None:
    if _current._tree is not None:
        _current._tree.let_go()


os.register_at_fork(after_in_child=_let_go_in_child)
