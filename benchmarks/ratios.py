"""The figures of a series of bursts."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Ratio:
    """Speed relative to the reference, over the rounds; 1 is as fast.

    Attributes:
        median: The figure.
        low: The lowest of any round.
        high: The highest of any round.
    """

    median: float
    low: float
    high: float


def pair_ratios(reference: Sequence[float], seconds: Sequence[float]) -> Ratio:
    """Returns the reference's seconds over a contestant's, paired by round.

    Args:
        reference: Seconds of the reference, one for each round.
        seconds: Seconds of the contestant for as many steps, in the same rounds.
    """
    ratios = [ours / theirs for ours, theirs in zip(reference, seconds, strict=True)]
    return Ratio(statistics.median(ratios), min(ratios), max(ratios))


def find_faster(seconds: Mapping[str, Sequence[float]], names: Sequence[str]) -> str:
    """Returns which of `names` that were measured has the lowest median seconds."""
    measured = [name for name in names if seconds.get(name)]
    return min(measured, key=lambda name: statistics.median(seconds[name]))


def choose_burst(
    seconds_per_step: float, seconds_per_burst: float, steps_per_loop: int
) -> int:
    """Returns the steps of one burst: whole loops, and at least one."""
    loops = seconds_per_burst / (seconds_per_step * steps_per_loop)
    return max(1, math.floor(loops + 0.5)) * steps_per_loop
