"""A stopwatch that is in one category at a time, so that its totals add up.

JAX reports a compilation when it has ended. Its seconds are then taken out of the
category that is running.
"""

import contextlib
import functools
import time
from collections.abc import Iterator
from contextvars import ContextVar
from enum import StrEnum

import jax


class Category(StrEnum):
    """What a second of a run was spent on. Every second is in exactly one category."""

    STEPPING = "stepping"
    """Training steps run on the device, or Python starts them or waits for them."""
    COMPILING = "compiling"
    """JAX traces or compiles, in whatever phase it has to."""
    DATA = "data"
    """A loop waits for data, and the device has no steps left to run."""
    SAVING = "saving"
    """Training waits for a save; what is written in the background is not counted."""
    RESTORING = "restoring"
    """A checkpoint is read."""
    EVALUATING = "evaluating"
    """An evaluation runs."""
    START_UP = "start_up"
    """From the start of the process to the start of training."""
    OTHER = "other"
    """Actions, summaries and log lines, as far as the device waits for them."""
    LOST = "lost"
    """Work after a checkpoint that the run went back to: it was done again."""
    DOWN = "down"
    """From the last sign of one attempt to the start of the next."""

    @property
    def label(self) -> str:
        """What people call it."""
        return _LABELS.get(self.value, self.value)


_LABELS = {
    "data": "waiting for data",
    "start_up": "start-up",
    "other": "actions, summaries, logging",
    "lost": "lost: work done again",
    "down": "lost: down between attempts",
}
_COMPILE_EVENTS = "/jax/core/compile/"

# What a traced step finds in `time` in its place warns of that.
_now = time.perf_counter
_active: ContextVar["Stopwatch | None"] = ContextVar("stopwatch", default=None)


class Stopwatch:
    """Counts seconds by category, `None` for none. Only one thread may use it.

    `moves` changes whenever the program goes on; in `category` it is since `began`.
    """

    def __init__(self, category: Category | None = None, elapsed: float = 0.0) -> None:
        self.category, self.moves = category, 0
        self.began = self._since = _now() - elapsed
        self._seconds = dict.fromkeys(Category, 0.0)
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

    def switch(self, category: Category | None) -> Category | None:
        """Goes on in another category; returns the one before."""
        now = _now()
        if self.category is not None:
            compiling = self.compile_seconds - self._seconds[Category.COMPILING]
            self._seconds[Category.COMPILING] += compiling
            self._seconds[self.category] += now - self._since - compiling
        self._compilations.clear()
        self._since = now
        if category is not self.category:
            self.began = now
        self.moves += 1
        previous, self.category = self.category, category
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
        # A trace may hold others, which were reported before it.
        while self._compilations and self._compilations[-1][0] >= start:
            self._compilations.pop()
        self._compilations.append((start, now))
        self.moves += 1


def get_stopwatch() -> Stopwatch | None:
    """Returns the stopwatch whose phase this thread is in, or `None`."""
    return _active.get()


@functools.cache
def _listen() -> None:
    jax.monitoring.register_event_duration_secs_listener(_add_compilation)


def _add_compilation(event: str, duration_secs: float, **_: str | int) -> None:
    # A background thread that compiles has no stopwatch: nobody waits for it.
    stopwatch = _active.get()
    if stopwatch is not None and event.startswith(_COMPILE_EVENTS):
        stopwatch.compiled(duration_secs)
