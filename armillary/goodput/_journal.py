"""Records one attempt of a run, from the start of its process on.

Attempts append to one file, `goodput.jsonl`: a line is one look at the clock. It holds
the totals of its attempt so far, so a line that is missing costs only detail.
"""

import contextlib
import json
import math
import os
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from armillary._records import LinesFile, read_lines
from armillary.goodput._stopwatch import Category, Stopwatch
from armillary.lifeline._lifeline import Place

FILE_NAME = "goodput.jsonl"
_FORMAT = "armillary-goodput-1"
_LONGEST_PAUSE_SECONDS = 10.0
# Whether an attempt has accounted for the start of this process.
_is_claimed = False


@dataclass(frozen=True)
class Entry:
    """One line: what an attempt, which is one controller, has done so far."""

    attempt: str
    event: str
    time: float
    step: int
    is_done: bool
    seconds: dict[Category, float]

    def as_line(self) -> str:
        """Returns the line, with its end."""
        seconds = {
            name: round(value, 6) for name, value in self.seconds.items() if value
        }
        record = {"format": _FORMAT, **vars(self), "seconds": seconds}
        record["done"] = record.pop("is_done")
        return json.dumps(record) + "\n"


def read_entries(path: str | os.PathLike[str]) -> tuple[list[Entry], list[int]]:
    """Reads a journal: its entries in order, and the numbers of lines that are none."""
    entries, unreadable = [], []
    for number, record in read_lines(Path(path)):
        entry = _as_entry(record)
        if entry is not None:
            entries.append(entry)
        else:
            unreadable.append(number)
    if not entries:
        raise ValueError(
            f"`{path}` has {len(unreadable)} lines that are not empty, but none in the "
            f"format {_FORMAT!r}, which this version of Armillary reads. Use the "
            "version that wrote it or the directory of another run, or move the file "
            "away to record anew."
        )
    return entries, unreadable


def _as_entry(record: Any) -> Entry | None:
    """Returns the entry that a line holds, or `None` if it is none."""
    try:
        if record.pop("format") != _FORMAT:
            return None
        record["is_done"] = record.pop("done")
        values = record.pop("seconds").items()
        seconds = {Category(name): float(value) for name, value in values}
        entry = Entry(**record, seconds=seconds)
    except (ValueError, TypeError, LookupError, AttributeError):
        return None
    texts, numbers = (entry.attempt, entry.event), (entry.time, *seconds.values())
    is_one = type(entry.step) is int and all(isinstance(each, str) for each in texts)
    is_one = is_one and all(isinstance(each, int | float) for each in numbers)
    return entry if is_one and all(map(math.isfinite, numbers)) else None


class Recorder(Stopwatch):
    """A stopwatch of what the controller does, with a journal of its totals.

    Nothing is written before training begins, so a job that only evaluates the
    checkpoints of another one leaves its journal alone. Time between two calls of the
    controller is not counted. That of the process before this attempt, as far as it has
    to account for it, is `start_up_seconds`.
    """

    def __init__(self, directory: Path | None, start_up_seconds: float = 0.0) -> None:
        super().__init__(Category.START_UP, elapsed=start_up_seconds)
        path = None if directory is None else directory / FILE_NAME
        self._file = LinesFile(path, "where the time goes is")
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
        names = {None: "outside of loops", Category.OTHER: "action"}
        return Place(names.get(self.category, str(self.category)), self.moves)

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
        if not self._has_begun or not self._file.is_on:
            return
        seconds = self.seconds
        elapsed = sum(seconds.values())
        pause = min(elapsed / 100, _LONGEST_PAUSE_SECONDS)
        if event == "loop" and elapsed - self._written_at < pause:
            return
        self._written_at = elapsed
        entry = Entry(self._attempt, event, time.time(), step, self._is_done, seconds)
        self._file.append(entry.as_line())


def make_recorder(directory: str | None) -> Recorder:
    """Returns what records a run; without a local directory, it writes nothing."""
    if directory is None or "://" in directory:
        return Recorder(None)
    return Recorder(Path(directory), _claim_start_up())


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
