"""Records one attempt of a run, from the start of its process on."""

import contextlib
import os
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

from armillary.goodput._category import Category
from armillary.goodput._journal import Entry, Journal
from armillary.goodput._stopwatch import Stopwatch
from armillary.lifeline._sightings import Place

_PHASES = {
    **{category: str(category) for category in Category},
    Category.STEPPING: "step",
    Category.SAVING: "save",
    Category.RESTORING: "restore",
    Category.EVALUATING: "evaluation",
    Category.OTHER: "action",
}
_LONGEST_PAUSE_SECONDS = 10.0
# Whether an attempt has accounted for the start of this process.
_is_claimed = False


class Recorder(Stopwatch):
    """A stopwatch of what the controller does, with a journal of its totals, if any.

    Nothing is written before training begins, so a job that only evaluates the
    checkpoints of another one leaves its journal alone. Time between two calls of the
    controller is not counted. That of the process before this attempt, as far as it has
    to account for it, is `start_up_seconds`.
    """

    def __init__(self, journal: Journal | None, start_up_seconds: float = 0.0) -> None:
        super().__init__(Category.START_UP, elapsed=start_up_seconds)
        self._journal = journal
        self._attempt = uuid.uuid4().hex[:12]
        self._step = 0
        self._has_begun = self._is_done = False
        self._written_at = 0.0

    @contextlib.contextmanager
    def phase(self, category: Category) -> Iterator[None]:
        """Counts a block in a category, and its compilations as such."""
        if category is Category.RESTORING:
            # A line parts what was done so far, and may be lost, from going back.
            self.mark("going back", self._step)
        with super().phase(category):
            yield

    def find_place(self) -> Place:
        """Returns where the program is; other threads may ask, too."""
        category = self.category
        phase = "outside of loops" if category is None else _PHASES[category]
        return Place(phase, self.moves)

    @contextlib.contextmanager
    def run(self, step: int, has_reached_goal: Callable[[], bool]) -> Iterator[None]:
        """Records a call that trains, from a global step.

        `has_reached_goal` tells at a regular end whether training ended as planned. If
        not, the time until the next attempt is lost.
        """
        self._has_begun, self._is_done = True, False
        try:
            with self.phase(Category.OTHER):
                self.mark("start", step)
                try:
                    yield
                    self._is_done = has_reached_goal()
                finally:
                    self.mark("end", self._step)
        finally:
            # Also after the first run: start-up has ended with its beginning.
            self.switch(None)

    def mark(self, event: str, step: int) -> None:
        """Notes that a step was reached, and writes a line of what happened there.

        Lines of a `"loop"` thin out as a run gets longer. All others are written: they
        part the work that a later attempt goes on from from the work that it does
        again.
        """
        self._step = step
        if self._journal is None or not self._has_begun:
            return
        seconds = self.seconds
        elapsed = sum(seconds.values())
        pause = min(elapsed / 100, _LONGEST_PAUSE_SECONDS)
        if event == "loop" and elapsed - self._written_at < pause:
            return
        self._written_at = elapsed
        self._journal.append(
            Entry(
                attempt=self._attempt,
                event=event,
                time=time.time(),
                step=step,
                is_done=self._is_done,
                seconds=seconds,
            )
        )


def make_recorder(directory: str | None) -> Recorder:
    """Returns what records a run; without a local directory, it writes nothing."""
    if directory is None or "://" in directory:
        return Recorder(None)
    return Recorder(Journal(directory), _claim_start_up())


def _claim_start_up() -> float:
    """Returns the age of this process in seconds to the first caller, and then 0."""
    global _is_claimed
    # Time at a prompt goes to thinking.
    if _is_claimed or hasattr(sys, "ps1"):
        return 0.0
    _is_claimed = True
    try:
        stat = Path("/proc/self/stat").read_text(errors="replace")
        # The name of the program comes first, and may hold spaces and brackets.
        started_at = int(stat.rpartition(")")[2].split()[19])
        now = time.clock_gettime(time.CLOCK_BOOTTIME)
    except (OSError, AttributeError):  # Not on Linux: imports keep the processor busy.
        return time.process_time()
    return max(0.0, now - started_at / os.sysconf("SC_CLK_TCK"))
