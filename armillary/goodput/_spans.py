"""The stretches of time of a run, and which of them were lost.

A run lost what it did again. So nothing has to be known about crashes: if steps were
run from step 20 on, all that came earlier in the record and lies beyond step 20 was in
vain, whether another attempt or the same one went back.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass

from armillary.goodput._category import Category
from armillary.goodput._journal import Entry


@dataclass(frozen=True)
class Span:
    """The time between two lines of a journal.

    Attributes:
        attempt: The attempt of the second line.
        end: Its time, in seconds since the epoch.
        num_steps: Steps that were run.
        is_lost: Whether they were run again later.
        seconds: Seconds by category: how long it lasted, in all.
    """

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
