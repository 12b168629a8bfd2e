"""One thread in each process, which receives reports and may end the process.

Every second, each process sends a report to process 0, through its parents in a tree,
and receives the reports of process 0 and of its parent. Between two loops, the same
connections carry the values on which all processes agree.
"""

import asyncio
import atexit
import contextlib
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from armillary._launcher import notify_launcher
from armillary._process import ExitCode
from armillary.lifeline._ending import (
    END,
    MAX_CHARACTERS,
    OUTSIDE,
    Pace,
    Phase,
    Report,
    Sighting,
    end_process,
    find_hang,
    find_stopped,
    is_attended,
    leave,
    read_work_seconds,
    set_timer,
    waits_for_own_code,
)
from armillary.lifeline._lines import COMPILER, Line, find_line, is_in, read_stack
from armillary.lifeline._transfer import find_transfers
from armillary.lifeline._tree import Ends, Tree, find_neighbors

_BEAT_SECONDS = 1.0
_SEND_SECONDS = 1.0
# A message that is sent before the thread listens is lost, and on a busy machine a
# thread may begin late.
_START_SECONDS = 60.0
_VERDICT_SECONDS = 10.0
_FAILURE_SECONDS = 5.0
"""The time in which the others may notice a failure by themselves."""
_LATE_SECONDS = 10.0
"""A beat that comes later than this means that the process was stopped."""
_CHIEF_SECONDS = 3.0
"""The time that the others leave to process 0, which decides for all of them."""
_PAUSE_SECONDS = 0.01
_MAX_CHARACTERS = 10_000  # in the text of an error
_CHIEF = 0


class Watched(NamedTuple):
    """The work of a program: its limit, its phase and its thread."""

    rule: float | None  # Seconds; `None` for the limit that `Pace` finds.
    find_phase: Callable[[], Phase]
    thread: threading.Thread = threading.main_thread()


class Verdict(NamedTuple):
    """The reason for which a job ends, and the processes that are the cause."""

    reason: str
    causes: Sequence[int] = ()
    stopped: Sequence[int] = ()  # The processes among them that do not answer.

    def report(self) -> None:
        """Names the causes to the launcher, which restarts the job."""
        for index in self.causes:
            notify_launcher("caused_by", index)
        for index in self.stopped:
            notify_launcher("stopped", index)


class Lifeline:
    """Watches the processes of a job, or one process that is alone."""

    def __init__(
        self, index: int = 0, count: int = 1, ends: Ends | None = None
    ) -> None:
        self._verdict: Verdict | None = None
        self._index = index
        self._count = count
        self._tree = Tree(index, count, ends)
        self._tree.note = self._note
        self.answers = self._tree.answers

        # All processes have joined before this object is made.
        known = {_CHIEF, self._tree.parent or _CHIEF, *self._tree.members}
        start = Report("start", "a line that it has not told", 0.0)
        seen = Sighting(start, time.monotonic())
        self._sightings = dict.fromkeys(sorted(known), seen)
        # The processes whose last reports are not passed on yet.
        self._fresh: set[int] = set()
        # By process: its error, and the time when it arrived.
        self._failures: dict[int, tuple[str, float]] = {}
        # In process 0, by key and process: the texts of `send_part`.
        self._parts: dict[str, dict[int, str]] = {}

        # The calls of controllers that run, newest last. If there is none, `_between`
        # counts, which `watch` sets.
        self._calls: dict[object, Watched] = {}
        self._between = Watched(math.inf, lambda: Phase(OUTSIDE))
        self._last_rule: float | None = None
        self._timer_rule: float | None = math.inf
        self._pace = Pace(time.monotonic())
        self._beat_at = math.inf
        self._has_ended = False
        self._has_failed = False

        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        # Other threads wait for these, and the thread of this object for the last one.
        self._is_open = threading.Event()
        self._has_verdict = threading.Event()
        self._is_done = asyncio.Event()

    def start(self) -> None:
        """Starts the thread, unless it runs already."""
        if self._thread is None:
            self._thread = threading.Thread(
                target=lambda: asyncio.run(self._watch()),
                name="armillary-lifeline",
                daemon=True,
            )
            self._thread.start()
            self._is_open.wait(_START_SECONDS)
            # JAX's exit function, which waits for the other processes, was registered
            # before this one, so it runs after it.
            atexit.register(self._report_how_it_ends)

    @contextlib.contextmanager
    def watching(
        self, rule: float | None, find_phase: Callable[[], Phase]
    ) -> Iterator[None]:
        """Reports the phase of the program, and ends it if it stays there too long.

        Several threads may call it at a time, and end in any order. The call that began
        last counts.

        Args:
            rule: The limit in seconds; `None` for the limit that `Pace` finds.
            find_phase: Returns the present phase.
        """
        token = object()
        self._last_rule = rule
        # ORDER: the limit counts from the first look at the new phase.
        self._pace.restart(time.monotonic())
        thread = threading.current_thread()
        self._calls[token] = Watched(rule, find_phase, thread)
        self._begin(rule)
        try:
            yield
        finally:
            self._calls.pop(token, None)

    def watch(self, rule: float | None, find_phase: Callable[[], Phase]) -> None:
        """Watches the program from now on, while no call of `watching` runs."""
        self._pace.restart(time.monotonic())
        self._between = Watched(rule, find_phase)
        self._begin(rule)

    def _begin(self, rule: float | None) -> None:
        """Starts to watch, unless the limit is infinite."""
        if rule == math.inf:
            return
        self.start()
        # The report is sent immediately, so that the others know the phase even if
        # this process is stopped now.
        self._send_report()
        if rule != self._timer_rule:
            self._set_timer(rule)

    def stop_watching_start(self) -> None:
        """Ends the watch over the code before a controller."""
        self.watch(math.inf, lambda: Phase(OUTSIDE))

    @property
    def _newest(self) -> "Watched":
        """The call that began last, or the code between two calls."""
        calls = list(self._calls.values())  # A copy, as threads may begin and end.
        return calls[-1] if calls else self._between

    @property
    def verdict(self) -> str | None:
        """The reason for which the job ends, if it does."""
        return None if self._verdict is None else self._verdict.reason

    def conclude(self, reason: str, cause: int) -> None:
        """Ends this process because of another one, unless a person is there."""
        if not hasattr(sys, "ps1"):
            self._call(self._conclude, Verdict(reason, [cause]))
            self._has_verdict.wait(_VERDICT_SECONDS)

    def close(self) -> None:
        """Ends the watch."""
        self._call(self._is_done.set)

    def report_failure(self, error: BaseException) -> None:
        """Sends the other processes the error with which this process ends."""
        if self._has_failed:
            return
        self._has_failed = True
        text = f"{type(error).__name__}: {error}"[:_MAX_CHARACTERS]
        notify_launcher("failed", text[:MAX_CHARACTERS])
        self._call(self._note_failure, self._index, text)

    def report_end(self) -> None:
        """Reports to the others that this process is at the end of its program."""
        self._has_ended = True
        self._send_report()

    def has_ended(self, index: int) -> bool:
        """Returns whether a process has reported the end of its program."""
        return self._sightings[index].report.has_ended

    def send_entry(self, entry: list[str]) -> None:
        """Sends the entry of this process to a round; `answers` gets all entries."""
        self._call(self._tree.add_entry, entry)

    def refuse(self, index: int, failure: str) -> None:
        """Ends a round, in process 0, with the failure of one process."""
        entry = ["error", "", failure]
        self._call(self._tree.answer, [(index, index + 1, entry)])

    def send_part(self, key: str, text: str) -> None:
        """Sends process 0 a text, from any thread and outside of the rounds."""
        self._call(self._note_part, self._index, key, text)

    def read_parts(self, key: str) -> dict[int, str]:
        """Returns the texts that have arrived for a key, by process."""
        return dict(self._parts.get(key, {}))

    def drop_parts(self, key: str) -> None:
        """Forgets the texts of a key."""
        self._call(self._parts.pop, key, None)

    @property
    def host(self) -> str:
        """The address under which the other processes reach this one."""
        return self._tree.ends.host

    def find_missing(self) -> list[int]:
        """Returns the processes that this one waits for; outside process 0, only it."""
        return self._tree.find_missing() if self._index == _CHIEF else [_CHIEF]

    def wait_for_children(self, timeout_seconds: float) -> list[int]:
        """Returns the children that have not connected in time."""
        end = time.monotonic() + timeout_seconds
        while True:
            links = self._tree.links
            missing = [index for index in self._tree.children if index not in links]
            is_over = self.verdict is not None or time.monotonic() > end
            if is_over or not missing:
                return missing
            time.sleep(_PAUSE_SECONDS)

    def wait_for_verdict(self, timeout_seconds: float) -> str | None:
        """Returns the reason for which the job ends, if it is known in time."""
        if self._count > 1:
            self._has_verdict.wait(timeout_seconds)
        return self.verdict

    def _call(self, function: Callable[..., Any], *arguments: Any) -> None:
        """Calls a function in the thread, after the earlier calls."""
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # The loop is closed.
                self._loop.call_soon_threadsafe(function, *arguments)

    def _send_report(self) -> None:
        """Sends the report of this process now, before the next beat."""
        if self._count > 1:
            now = time.monotonic()
            own, _ = self._report(now)
            self._call(self._pass_reports, own, now)

    def _report_how_it_ends(self) -> None:
        """Reports, at the exit of Python, an error or the end of the program."""
        if self._is_done.is_set():
            return
        if self._count == 1:
            return  # No other process waits for it.
        self._calls.clear()
        self.watch(self._last_rule, lambda: Phase(END))
        error = getattr(sys, "last_value", None)
        if error is not None:
            self.report_failure(error)
        if not self._has_failed:
            self.report_end()
        # Calls run in order, so the report is sent when this one has run.
        is_sent = threading.Event()
        self._call(is_sent.set)
        is_sent.wait(_SEND_SECONDS)

    async def _watch(self) -> None:
        """Runs in the thread until the watch, the job or the process ends."""
        self._loop = asyncio.get_running_loop()
        await self._tree.open()
        self._is_open.set()
        last_error = ""
        while not self._is_done.is_set():
            try:
                self._beat(time.monotonic())
            except Exception as error:
                set_timer(math.inf)  # This thread may not be able to set it again.
                text = f"The watch over this process has failed: {error!r}\n"
                if text != last_error:
                    os.write(2, text.encode(errors="replace"))
                last_error = text
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._is_done.wait(), _BEAT_SECONDS)

        # The next lines take some seconds. The timer stays, in case they get stuck.
        if self._verdict is not None:
            self._tree.send(list(self._tree.links), "verdict", self._verdict)
            # Each process names the causes to the launcher, in case another one cannot.
            self._verdict.report()
            self._has_verdict.set()
            if self._has_failed:
                # The others end because of this process, which has shown its error.
                leave(ExitCode.FAILED)
            end_process(self._verdict.reason)
        set_timer(math.inf)
        self._tree.close()

    def _beat(self, now: float) -> None:
        """Reports, and checks whether any process makes progress."""
        seconds_late = now - self._beat_at
        if seconds_late > _LATE_SECONDS:
            self._skip(seconds_late)
        self._beat_at = now

        own, rule = self._report(now)
        self._set_timer(rule)
        self._pass_reports(own, now)
        self._tree.pass_on()

        for index, (failure, at) in self._failures.items():
            if now > at + _FAILURE_SECONDS:
                reason = f"Process {index} of {self._count} has failed: {failure}"
                self._conclude(Verdict(reason, [index]))
        if self._index == _CHIEF or self._replaces_chief(own, now):
            sightings = self._trace_silence(now)
            reason = find_hang(sightings, self._count, now)
            if reason is not None:
                stopped = find_stopped(sightings, now)
                self._conclude(Verdict(reason, stopped, stopped))

    def _replaces_chief(self, own: Report, now: float) -> bool:
        """Returns whether process 0, which decides for all, is itself stopped."""
        if own.limit_seconds is None:
            return False
        silent_seconds = now - self._sightings[_CHIEF].time
        return silent_seconds >= own.limit_seconds + _CHIEF_SECONDS

    def _skip(self, seconds: float) -> None:
        """Leaves out a time in which this process was suspended.

        A scheduler suspends all processes of a job together, so the others could not
        report either.
        """
        self._pace.skip(seconds)
        moved: dict[int, Sighting] = {}
        for index, seen in self._sightings.items():
            moved[index] = seen._replace(time=seen.time + seconds)
        # ORDER: in one assignment, because other threads read the sightings.
        self._sightings = moved

    def _set_timer(self, rule: float | None) -> None:
        """Ends this process some seconds after its limit, unless it is set again."""
        self._timer_rule = rule
        set_timer(self._pace.find_limit(rule))

    def _report(self, now: float) -> tuple[Report, float | None]:
        """Returns the report of this process, and the rule for its timer."""
        watched = self._newest
        phase = watched.find_phase()
        stack = read_stack(watched.thread.ident)
        rule = self._find_rule(watched, phase, stack)
        timer_rule = rule
        transfers = find_transfers(phase.name)
        num_bytes = sum(transfer.num_bytes for transfer in transfers)
        phase = phase._replace(num_bytes=num_bytes)
        if is_in(COMPILER, stack):
            # A compilation may take any time. The timer still counts, in case C code
            # keeps the lock of the interpreter.
            phase = Phase("compiling")
            rule = math.inf

        pace = self._pace
        work_seconds = read_work_seconds(phase.name, watched.thread)
        pace.look(phase, work_seconds, now)
        limit = pace.find_limit(rule)
        if not rule:
            # By default, a program that computes makes progress.
            limit += pace.busy_seconds
        report = Report(
            phase=phase.name,
            line=find_line(phase.name, stack),
            quiet_seconds=now - pace.began,
            limit_seconds=None if limit == math.inf else limit,
            has_ended=self._has_ended,
            moved=", ".join(map(str, transfers)),
        )
        return report, timer_rule

    def _find_rule(
        self, watched: Watched, phase: Phase, stack: list[Line]
    ) -> float | None:
        """Returns the user's limit; infinite if there is none and a wait is normal."""
        if watched.rule is not None:
            return watched.rule
        if is_attended(phase.name, stack):
            return math.inf
        if self._count == 1 and waits_for_own_code(phase.name):
            return math.inf
        return None

    def _pass_reports(self, own: Report, now: float) -> None:
        """Sends new reports to the neighbors in the tree.

        The parent gets the reports of this process and of all processes below it. The
        children get the reports of this process and of process 0.
        """
        self._sightings[self._index] = Sighting(own, now)
        tree = self._tree
        up: list[Any] = []
        down: list[Any] = []
        for index in sorted({*self._fresh, self._index}):
            seen = self._sightings[index]
            # The clocks of machines differ, so a report holds no time of arrival.
            quiet_seconds = seen.quiet_seconds(now)
            report = seen.report._replace(quiet_seconds=quiet_seconds)
            if index in tree.members:
                up.append([index, report])
            if index in (_CHIEF, self._index):
                down.append([index, report])
        self._fresh = set()
        tree.send([tree.parent], "reports", up)
        tree.send(tree.children, "reports", down)

    def _trace_silence(self, now: float) -> dict[int, Sighting]:
        """Returns all sightings; a silent process between is added to each as `by`."""
        traced = dict(self._sightings)
        for index, seen in traced.items():
            # A report from outside of this branch of the tree comes through the parent.
            end = index if index in self._tree.members else self._index
            by, _, _ = find_neighbors(end, self._count)
            if by is None or index == self._index:
                continue
            is_between = by not in (index, self._index)
            if is_between and self._sightings[by].is_silent(now):
                traced[index] = seen._replace(by=by)
        return traced

    def _note(self, index: int, kind: str, value: Any) -> None:
        """Handles a message of a neighbor, or the end of its connection."""
        now = time.monotonic()
        if kind == "reports":
            for who, report in value:
                self._sightings[who] = Sighting(Report(*report), now)
                self._fresh.add(who)
        elif kind == "failure":
            self._note_failure(*value)
        elif kind == "part":
            self._note_part(*value)
        elif kind == "verdict":
            self._conclude(Verdict(*value))
        elif index not in self._failures and not self.has_ended(index):
            report = self._sightings[index].report
            moved = f" with {report.moved}" if report.moved else ""
            reason = (
                f"Process {index} of {self._count} is gone ({report.phase}{moved}, "
                f"{report.line}). It was killed, has crashed, or its machine or "
                "network is down. Its own output may show the reason."
            )
            self._conclude(Verdict(reason, [index]))

    def _note_failure(self, index: int, text: str) -> None:
        """Passes a failure on to process 0, which ends the round with it.

        The children of the failed process get it too, or they would report that the
        process is gone.
        """
        tree = self._tree
        message = ("failure", [index, text])
        if index == self._index:
            tree.send(tree.children, *message)
        else:
            self._failures.setdefault(index, (text, time.monotonic()))
        if self._index == _CHIEF:
            self.refuse(index, text)
        elif index in tree.members:
            tree.send([tree.parent], *message)

    def _note_part(self, index: int, key: str, text: str) -> None:
        """Keeps a text in process 0; other processes pass it on."""
        if self._index == _CHIEF:
            self._parts.setdefault(key, {})[index] = text
        else:
            self._tree.send([self._tree.parent], "part", [index, key, text])

    def _conclude(self, verdict: Verdict) -> None:
        """Ends the watch with a verdict; the first one counts."""
        if self._verdict is None:
            self._verdict = verdict
            self._is_done.set()


_current = Lifeline()  # The lifeline of a process that is alone.
_seconds_waited = 0.0


@contextlib.contextmanager
def waiting() -> Iterator[None]:
    """Counts a block in which the program waits for other processes or its devices."""
    global _seconds_waited
    start = time.perf_counter()
    try:
        yield
    finally:
        _seconds_waited += time.perf_counter() - start


def read_waits() -> float:
    """Returns the seconds for which the program has waited so far."""
    return _seconds_waited


def get_lifeline() -> Lifeline:
    return _current


def set_lifeline(lifeline: Lifeline) -> None:
    global _current
    _current = lifeline


def _release_in_child() -> None:
    _current._tree.release_in_child()


os.register_at_fork(after_in_child=_release_in_child)
