"""The journal of a run's time, and the sums over its attempts.

Attempts append to one file, `goodput.jsonl`. A line has the totals of its attempt at
one moment. Work that was done again counts as lost: if an attempt starts at step 20,
all earlier work beyond step 20 is lost.
"""

import contextlib
import itertools
import json
import math
import os
import sys
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from armillary._checks import check_path
from armillary._records import LinesFile, read_lines
from armillary.goodput._stopwatch import Category, Stopwatch
from armillary.lifeline._lifeline import Phase

FILE_NAME = "goodput.jsonl"
_FORMAT = "armillary-goodput-1"
_MAX_PAUSE_SECONDS = 10.0
# Whether an attempt has accounted for the start of this process.
_is_claimed = False


@dataclass(frozen=True)
class Entry:
    """One line: the progress so far of an attempt, which is one controller."""

    attempt: str
    event: str
    time: float
    step: int
    is_done: bool
    seconds: dict[Category, float]
    note: str = ""

    def as_line(self) -> str:
        seconds: dict[str, float] = {}
        for category, value in self.seconds.items():
            if value:
                seconds[category] = round(value, 6)
        record = {"format": _FORMAT, **vars(self), "seconds": seconds}
        record["done"] = record.pop("is_done")
        if not self.note:
            del record["note"]
        return json.dumps(record) + "\n"


def _as_entry(record: Any) -> Entry | None:
    """Returns the entry in a line, or `None` if the line has no entry."""
    try:
        if record["format"] != _FORMAT:
            return None
        values = record["seconds"].items()
        entry = Entry(
            attempt=str(record["attempt"]),
            event=str(record["event"]),
            time=float(record["time"]),
            step=int(record["step"]),
            is_done=bool(record["done"]),
            seconds={Category(name): float(value) for name, value in values},
            note=str(record.get("note", "")),
        )
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
        return None
    is_finite = all(map(math.isfinite, (entry.time, *entry.seconds.values())))
    return entry if is_finite else None


def read_entries(path: Path) -> list[Entry]:
    """Reads a journal in order, without lines that a crash or a full disk damaged."""
    found = [_as_entry(record) for _, record in read_lines(path)]
    entries = [entry for entry in found if entry is not None]
    if not entries:
        raise ValueError(
            f"`{path}` has {len(found)} lines, but none in the format {_FORMAT!r}, "
            "which this version of Armillary reads. Use the version that wrote it or "
            "another run, or move the file away to record a new one."
        )
    return entries


@dataclass(frozen=True)
class Goodput:
    """The time of a run by category.

    Args:
        seconds: The seconds of every category. They add up to the time of the run, from
            the start of its first process to its last entry. Pauses after training had
            ended as planned do not count.
        num_attempts: The number of controllers that trained.
        num_steps: The number of steps that count, each once.
        num_lost_steps: The number of steps that had to be run again.
        stragglers: The warnings about processes that the others waited for.
    """

    seconds: dict[Category, float]
    num_attempts: int
    num_steps: int
    num_lost_steps: int
    stragglers: tuple[str, ...] = ()

    @property
    def total_seconds(self) -> float:
        """The time of the run."""
        return math.fsum(self.seconds.values())

    @property
    def goodput(self) -> float:
        """The share of the time for steps that count, from 0 to 1."""
        total = self.total_seconds
        return self.seconds[Category.STEPPING] / total if total else 0.0


def read_goodput(run_dir: str | os.PathLike[str]) -> Goodput:
    """Reads the time of a run by category; the run may still be running.

    Args:
        run_dir: The directory of the run's checkpoints, or the directory above it.

    Raises:
        ValueError: If `run_dir` is not a directory, holds no record or several, or the
            record cannot be read.
    """
    path = Path(check_path("run_dir", run_dir, only_python_opens=True))
    found = find_journals(path)
    if len(found) != 1:
        choices = ", ".join(repr(str(journal.parent)) for journal in found)
        fix = f"one of {choices}" if found else "its checkpoints"
        raise ValueError(
            f"`run_dir` is {str(run_dir)!r}, but there are {len(found)} files "
            f"`{FILE_NAME}` in it or just below it, and it must be the directory of "
            f"one run. Use {fix}."
        )
    return add_up(read_entries(found[0]))


def find_journals(run_dir: Path) -> list[Path]:
    """Returns the journal in a directory, or else the journals in its folders."""
    own = run_dir / FILE_NAME
    return [own] if own.exists() else sorted(run_dir.glob(f"*/{FILE_NAME}"))


def add_up(entries: Iterable[Entry]) -> Goodput:
    """Adds up the entries of a journal, in its order."""
    entries = list(entries)
    firsts: dict[str, Entry] = {}
    lasts: dict[str, Entry] = {}
    # Each entry, after the entry before it in the same attempt.
    pairs: list[tuple[Entry, Entry]] = []
    for entry in entries:
        firsts.setdefault(entry.attempt, entry)
        pairs.append((lasts.get(entry.attempt, entry), entry))
        lasts[entry.attempt] = entry

    seconds = dict.fromkeys(Category, 0.0)
    num_steps = 0
    num_lost_steps = 0
    # From the end: work counts if no later attempt began before it.
    lowest = math.inf
    for last, entry in reversed(pairs):
        advance = max(0, entry.step - last.step)
        is_lost = entry.step > lowest
        for category, value in entry.seconds.items():
            before = 0.0 if last is entry else last.seconds.get(category, 0.0)
            seconds[Category.LOST if is_lost else category] += value - before
        if is_lost:
            num_lost_steps += advance
        else:
            num_steps += advance
        if advance:
            lowest = min(lowest, last.step)

    for one, other in itertools.pairwise(firsts):
        if not lasts[one].is_done:
            first = firsts[other]
            began = first.time - math.fsum(first.seconds.values())
            seconds[Category.DOWN] += max(0.0, began - lasts[one].time)
    notes = tuple(dict.fromkeys(entry.note for entry in entries if entry.note))
    return Goodput(seconds, len(firsts), num_steps, num_lost_steps, notes)


class Recorder(Stopwatch):
    """A stopwatch for a controller, with a journal of its totals.

    Nothing is written before training begins. So a job that only evaluates the
    checkpoints of another job does not change the journal.
    """

    def __init__(self, directory: Path | None, start_up_seconds: float = 0.0) -> None:
        super().__init__(Category.START_UP, elapsed=start_up_seconds)
        path = None if directory is None else directory / FILE_NAME
        self._file = LinesFile(path, "where the time goes is")
        self._attempt = uuid.uuid4().hex[:12]
        self._step = 0
        self._has_begun = False
        self._is_done = False
        self._written_at = 0.0

    @contextlib.contextmanager
    def phase(self, category: Category) -> Iterator[None]:
        """Counts a block in a category, and its compilations as such."""
        if category is Category.RESTORING:
            # This line separates the work so far, which may be lost, from the restore.
            self.mark("going back", self._step)
        with super().phase(category):
            yield

    def find_phase(self) -> Phase:
        """Returns the phase of the program; other threads may call it, too."""
        names = {None: "outside of loops", Category.OTHER: "action"}
        return Phase(names.get(self.category, str(self.category)), self.moves)

    @contextlib.contextmanager
    def run(self, step: int, has_reached_goal: Callable[[], bool]) -> Iterator[None]:
        """Records a call that trains.

        If it ends before its goal, the following pause counts as lost.
        """
        self._has_begun = True
        self._is_done = False
        event = "end"
        try:
            with self.phase(Category.OTHER):
                self.mark("start", step)
                try:
                    yield
                    self._is_done = has_reached_goal()
                    event = "end" if self._is_done else "stop"
                finally:
                    self.mark(event, self._step)
        finally:
            # To no category: start-up ended when the first call began.
            self.switch(None)

    def mark(self, event: str, step: int, note: str = "") -> None:
        """Notes that a step was reached, and writes a line about an event there.

        Lines of a `"loop"` become rarer as a run gets longer.
        """
        self._step = step
        if not self._has_begun or not self._file.is_on:
            return
        seconds = self.seconds
        elapsed = sum(seconds.values())
        pause = min(elapsed / 100, _MAX_PAUSE_SECONDS)
        if event == "loop" and elapsed - self._written_at < pause:
            return
        self._written_at = elapsed
        entry = Entry(
            self._attempt, event, time.time(), step, self._is_done, seconds, note
        )
        self._file.append(entry.as_line())


def make_recorder(directory: str | None) -> Recorder:
    """Returns the recorder of a run; without a local directory, it writes nothing."""
    if directory is None or "://" in directory:
        return Recorder(None)
    return Recorder(Path(directory), _claim_start_up())


def _claim_start_up() -> float:
    """Returns the age of this process in seconds to the first caller, and then 0."""
    global _is_claimed
    # At an interactive prompt, the time since the start says nothing.
    if _is_claimed or hasattr(sys, "ps1"):
        return 0.0
    _is_claimed = True
    try:
        stat = Path("/proc/self/stat").read_text(errors="replace")
        # The name of the program comes first, and may hold spaces and brackets.
        started_at = int(stat.rpartition(")")[2].split()[19])
        now = time.clock_gettime(time.CLOCK_BOOTTIME)
    except (OSError, AttributeError):  # Not on Linux. CPU time is close during imports.
        return time.process_time()
    return max(0.0, now - started_at / os.sysconf("SC_CLK_TCK"))
