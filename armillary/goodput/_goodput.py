"""Adds up where the time of a run went, over all of its attempts.

A run lost what it did again. So nothing has to be known about crashes: if steps were
run from step 20 on, all that came earlier in the record and lies beyond step 20 was in
vain, whether another attempt or the same one went back.
"""

import dataclasses
import itertools
import math
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from armillary._checks import check_path
from armillary.goodput._journal import FILE_NAME, Entry, read_entries
from armillary.goodput._stopwatch import Category


@dataclass(frozen=True)
class Span:
    """The time between two lines of an attempt; lost if its steps were run again."""

    attempt: str
    end: float
    num_steps: int
    is_lost: bool
    seconds: dict[Category, float]

    @property
    def begin(self) -> float:
        """When it began, in seconds since the epoch."""
        return self.end - math.fsum(self.seconds.values())


def find_spans(entries: Iterable[Entry]) -> list[Span]:
    """Returns the spans of a journal, in order of time."""
    firsts: dict[str, Entry] = {}
    lasts: dict[str, Entry] = {}
    pairs: list[tuple[Entry, Entry]] = []
    for entry in entries:
        firsts.setdefault(entry.attempt, entry)
        last = lasts.get(entry.attempt, dataclasses.replace(entry, seconds={}))
        pairs.append((last, entry))
        lasts[entry.attempt] = entry
    spans: list[Span] = []
    lowest = math.inf
    for last, entry in reversed(pairs):
        advance = max(0, entry.step - last.step)
        is_lost = entry.step > lowest
        seconds = {
            category: value - last.seconds.get(category, 0.0)
            for category, value in entry.seconds.items()
        }
        if is_lost:
            seconds = {Category.LOST: math.fsum(seconds.values())}
        spans.append(Span(entry.attempt, entry.time, advance, is_lost, seconds))
        if advance:
            lowest = min(lowest, last.step)
    for one, other in itertools.pairwise(firsts):
        end = _began(firsts[other])
        gap = 0.0 if lasts[one].is_done else max(0.0, end - lasts[one].time)
        spans.append(Span(other, end, 0, False, {Category.DOWN: gap}))
    return sorted(spans, key=lambda span: span.end)


def _began(first: Entry) -> float:
    return first.time - math.fsum(first.seconds.values())


@dataclass(frozen=True)
class Goodput:
    """Where the time of a run went.

    Args:
        seconds: The seconds of every category. They add up to the time of the run, from
            the start of its first process to its last sign of life, without pauses
            after training had ended as planned.
        num_attempts: How many controllers trained.
        num_steps: Steps that count, each once.
        num_lost_steps: Steps that were run and had to be run again.
        unreadable_lines: Numbers of lines in the record that could not be read.
    """

    seconds: dict[Category, float]
    num_attempts: int
    num_steps: int
    num_lost_steps: int
    unreadable_lines: tuple[int, ...] = ()

    @property
    def total_seconds(self) -> float:
        """The time of the run."""
        return math.fsum(self.seconds.values())

    @property
    def goodput(self) -> float:
        """The share of the time that went into steps that count, from 0 to 1."""
        total = self.total_seconds
        return self.seconds[Category.STEPPING] / total if total else 0.0


def read_goodput(run_dir: str | os.PathLike[str]) -> Goodput:
    """Reads where the time of a run went.

    It may be read while the run goes on.

    Args:
        run_dir: The directory of the run's checkpoints, or the one above it.

    Raises:
        ValueError: If `run_dir` is no directory, holds no record or several, or the
            record cannot be read.
    """
    entries, unreadable = read_entries(
        _find_journal(Path(check_path("run_dir", run_dir)))
    )
    return add_up(entries, unreadable)


def add_up(entries: Iterable[Entry], unreadable_lines: Iterable[int] = ()) -> Goodput:
    """Adds up the entries of a journal, in its order."""
    spans = find_spans(entries)
    seconds = dict.fromkeys(Category, 0.0)
    for span in spans:
        for category, value in span.seconds.items():
            seconds[category] += value
    return Goodput(
        seconds=seconds,
        num_attempts=len({span.attempt for span in spans}),
        num_steps=sum(span.num_steps for span in spans if not span.is_lost),
        num_lost_steps=sum(span.num_steps for span in spans if span.is_lost),
        unreadable_lines=tuple(unreadable_lines),
    )


def _find_journal(run_dir: Path) -> Path:
    own = run_dir / FILE_NAME
    found = [own] if own.exists() else sorted(run_dir.glob(f"*/{FILE_NAME}"))
    if len(found) > 1:
        choices = ", ".join(repr(str(path.parent)) for path in found)
        raise ValueError(
            f"`run_dir` is {str(run_dir)!r}, below which there are {len(found)} runs, "
            f"but it must be the directory of one. Use one of {choices}."
        )
    if not found:
        raise ValueError(
            f"`run_dir` is {str(run_dir)!r}, but there is no `{FILE_NAME}` in it or in "
            "a directory in it. A `Controller` with a `checkpoint_manager` writes it "
            "into the directory of the checkpoints when it trains: use that one."
        )
    return found[0]
