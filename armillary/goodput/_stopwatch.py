"""A stopwatch that is in one category at a time, so that its totals add up.

JAX reports a compilation when it has ended. Its seconds are then subtracted from the
current category. The processes exchange their times to find the process that the others
wait for.
"""

import contextlib
import functools
import statistics
import time
from collections.abc import Collection, Iterator, Sequence
from contextvars import ContextVar
from enum import StrEnum
from typing import NamedTuple

import jax

from armillary.lifeline._lifeline import read_waits


class Category(StrEnum):
    """The use of a second of a run. Every second is in exactly one category."""

    STEPPING = "stepping"
    """Training steps run on the device, or Python starts them or waits for them."""
    COMPILING = "compiling"
    """JAX traces or compiles, or Armillary checks what was traced, in any phase."""
    DATA = "data"
    """A loop waits for data, and the device has no steps left to run."""
    SAVING = "saving"
    """Training waits for a save; writing in the background does not count."""
    RESTORING = "restoring"
    """A checkpoint is read."""
    EVALUATING = "evaluating"
    """An evaluation runs."""
    START_UP = "start_up"
    """From the start of the process to the start of training."""
    OTHER = "other"
    """Actions, summaries and log lines, as far as the device waits for them."""
    LOST = "lost"
    """Work after a checkpoint that the run went back to, which was done again."""
    DOWN = "down"
    """From the last entry of one attempt to the start of the next."""

    @property
    def label(self) -> str:
        """The name that tables show."""
        return _LABELS.get(self.value, self.value)


_LABELS = {
    "data": "waiting for data",
    "start_up": "start-up",
    "other": "actions, summaries, logging",
    "lost": "lost: work done again",
    "down": "lost: down between attempts",
}
_COMPARED = [Category.DATA, Category.STEPPING, Category.SAVING, Category.EVALUATING]
_TIMES_SLOWER = 1.5
_MIN_SECONDS = 0.1
_COMPILE_EVENTS = "/jax/core/compile/"

# A name of this module, so that tests replace only this clock.
_now = time.perf_counter
_active: ContextVar["Stopwatch | None"] = ContextVar("stopwatch", default=None)


class Stopwatch:
    """Counts seconds by category, `None` for none. Only one thread may use it.

    `moves` changes whenever the program makes progress. The current `category` lasts
    since `began`.
    """

    def __init__(self, category: Category | None = None, elapsed: float = 0.0) -> None:
        self.category = category
        self.moves = 0
        self.began = self._since = _now() - elapsed
        self._seconds = dict.fromkeys(Category, 0.0)
        self._waits = dict.fromkeys(Category, 0.0)
        self._waits_before = read_waits()
        self._compilations: list[tuple[float, float]] = []

    @property
    def seconds(self) -> dict[Category, float]:
        """The seconds of each category so far."""
        self.switch(self.category)
        return dict(self._seconds)

    @property
    def compile_seconds(self) -> float:
        """The seconds of compilations so far."""
        pending = sum(end - start for start, end in self._compilations)
        return self._seconds[Category.COMPILING] + pending

    @property
    def times(self) -> "Times":
        """The seconds so far in the categories that processes compare."""
        seconds = self.seconds
        waits = [self._waits[category] for category in _COMPARED]
        totals = [seconds[category] for category in _COMPARED]
        own = [total - wait for total, wait in zip(totals, waits, strict=True)]
        return Times._make([*own, sum(waits)])

    def switch(self, category: Category | None) -> Category | None:
        """Changes to another category; returns the previous one."""
        now = _now()
        waits = read_waits()
        if self.category is not None:
            self._waits[self.category] += waits - self._waits_before
            compiling = self.compile_seconds - self._seconds[Category.COMPILING]
            self._seconds[Category.COMPILING] += compiling
            self._seconds[self.category] += now - self._since - compiling
        self._compilations.clear()
        self._since = now
        self._waits_before = waits
        if category is not self.category:
            self.began = now
        self.moves += 1
        previous = self.category
        self.category = category
        return previous

    @contextlib.contextmanager
    def phase(self, category: Category) -> Iterator[None]:
        """Counts a block in a category, and its compilations as such."""
        _listen()
        token = _active.set(self)
        previous = self.switch(category)
        try:
            yield
        finally:
            self.switch(previous)
            _active.reset(token)

    def compiled(self, seconds: float) -> None:
        """Counts a compilation that has ended now."""
        now = _now()
        start = max(now - seconds, self._since)
        # A trace may contain other traces, which were reported before it.
        while self._compilations and self._compilations[-1][0] >= start:
            self._compilations.pop()
        self._compilations.append((start, now))
        self.moves += 1


def get_stopwatch() -> Stopwatch | None:
    """Returns the stopwatch whose phase this thread is in, or `None`."""
    return _active.get()


@contextlib.contextmanager
def compiling() -> Iterator[None]:
    """Counts a block as compilation, with the work of the library around JAX's own.

    Does nothing outside of a phase of a stopwatch.
    """
    start = _now()
    try:
        yield
    finally:
        stopwatch = _active.get()
        if stopwatch is not None:
            stopwatch.compiled(_now() - start)


@functools.cache
def _listen() -> None:
    jax.monitoring.register_event_duration_secs_listener(_add_compilation)


def _add_compilation(event: str, duration_secs: float, **_: str | int) -> None:
    # A background thread has no stopwatch, so its compilations do not count.
    stopwatch = _active.get()
    if stopwatch is not None and event.startswith(_COMPILE_EVENTS):
        stopwatch.compiled(duration_secs)


class Times(NamedTuple):
    """The seconds of a process by category, and the seconds in which it waited."""

    data: float
    step: float
    save: float
    evaluation: float
    waiting: float

    def since(self, before: "Times") -> "Times":
        """Returns the seconds since an earlier moment, to the millisecond."""
        pairs = zip(self, before, strict=True)
        return Times._make(round(now - then, 3) for now, then in pairs)


class Straggler(NamedTuple):
    """A process that the others wait for; `others` is the median of their seconds."""

    process: int
    phase: str
    seconds: float
    others: float


def find_straggler(
    halves: Sequence[Sequence[Times]], named: Collection[int] = ()
) -> Straggler | None:
    """Returns the process that takes 1.5 times as long as the others in each half."""
    # In both halves, because a save or the start may slow down a process once.
    processes: set[int] = set()
    for times in halves:
        slowest = _find_slowest(times, named)
        if slowest is None:
            return None
        processes.add(slowest.process)
    if len(processes) != 1:
        return None
    whole = [_add(both_halves) for both_halves in zip(*halves, strict=True)]
    return _find_slowest(whole, named)


def _add(times: Sequence[Times]) -> Times:
    """Returns the sums of the times of one process."""
    return Times._make(map(sum, zip(*times, strict=True)))


def _find_slowest(times: Sequence[Times], named: Collection[int]) -> Straggler | None:
    """Returns the process that is much slower than the others, if there is one."""
    candidates = [index for index in range(len(times)) if index not in named]
    if len(times) < 2 or not candidates:
        return None
    # All processes wait for their devices, which wait for each other. The process that
    # waits least is the slowest, and its waiting is the time of the devices alone.
    devices = min(process_times.waiting for process_times in times)
    totals: list[float] = []
    for *phases, _ in times:
        totals.append(sum(phases) + devices)
    index = max(candidates, key=totals.__getitem__)
    seconds = totals[index]
    median = statistics.median(totals[:index] + totals[index + 1 :])
    is_slower = seconds >= _TIMES_SLOWER * median
    if not is_slower or seconds < median + _MIN_SECONDS:
        return None

    # The phase in which it loses most.
    others = [*times[:index], *times[index + 1 :]]
    medians = [statistics.median(values) for values in zip(*others, strict=True)]
    *own, _ = times[index]
    *usual, _ = medians
    excesses = [mine - theirs for mine, theirs in zip(own, usual, strict=True)]
    phase = Times._fields[excesses.index(max(excesses))]
    return Straggler(index, phase, seconds, median)
