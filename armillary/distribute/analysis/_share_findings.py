"""Findings about numbers that depend on how replicas share the examples of a batch.

`_shares.py` follows the facts about values. Where a value leaves the step, or where
replicas reduce it, a finding is recorded here.
"""

import math
from typing import Any, NamedTuple

from armillary._jax_compat import read_real
from armillary.distribute.analysis._marks import DENOMINATOR, NUMERATOR, SUMMED
from armillary.distribute.analysis._share_facts import (
    ANY,
    EQUAL,
    LASTING,
    Cause,
    CauseKind,
    Reach,
    ShareFacts,
    first_of,
)

PARTS = (SUMMED, NUMERATOR, DENOMINATOR)
"""The marks of the numbers that a metric object adds up."""


class MetricOfShare(NamedTuple):
    """A metric that depends on the share: its name, or its line."""

    name: str
    cause: Cause


class ReductionOfShare(NamedTuple):
    """A mean or a sum over replicas of numbers that depend on the share."""

    line: str
    cause: Cause


class MeanOfSums(NamedTuple):
    """A mean over replicas of the gradients of a sum over examples."""

    line: str
    num_examples: int


class SumOfEqual(NamedTuple):
    """A metric that adds the same number on every replica."""

    line: str


class SumOfMeans(NamedTuple):
    """A metric that adds up the means of the replicas."""

    line: str


class StateOfSum(NamedTuple):
    """A value of the state that holds a mean over replicas of a sum over examples.

    Attributes:
        result: The number of the value among the results of the step.
        line: The line of the mean; empty if the end of the step takes it.
        num_examples: The number of examples of one replica.
    """

    result: int
    line: str
    num_examples: int


ShareFinding = (
    StateOfSum | MetricOfShare | ReductionOfShare | MeanOfSums | SumOfEqual | SumOfMeans
)


class ShareRecords:
    """The findings about one step.

    Args:
        sizes: The numbers of examples in the parts of a batch.

    Attributes:
        exchanges: Whether replicas send examples to each other, to compare them part by
            part.
    """

    def __init__(self, sizes: set[int]) -> None:
        self.exchanges = False
        self._sizes = sizes
        self._metrics: dict[str, set[Cause]] = {}
        self._reductions: dict[str, set[Cause]] = {}
        self._means_of_sums: dict[str, int] = {}
        self._equal_sums: set[str] = set()
        self._sums_of_means: set[str] = set()
        self._numerator = EQUAL

    def findings(self) -> list[ShareFinding]:
        """Returns all findings except those about the state."""
        found: list[ShareFinding] = []
        for name, causes in self._metrics.items():
            if certain := self._certain(causes):
                found.append(MetricOfShare(name, first_of(certain)))
        for line, causes in self._reductions.items():
            if certain := self._certain(causes):
                found.append(ReductionOfShare(line, first_of(certain)))
        for line, num_examples in self._means_of_sums.items():
            found.append(MeanOfSums(line, num_examples))
        found += map(SumOfEqual, sorted(self._equal_sums))
        found += map(SumOfMeans, sorted(self._sums_of_means))
        return found

    def _certain(self, causes: set[Cause]) -> set[Cause]:
        """Returns the causes that no exchange between replicas can make up for.

        A step that sends examples around compares the examples of a replica with each
        other, and then with examples of the next replica.
        """
        if not self.exchanges:
            return causes
        return {cause for cause in causes if cause.kind is not CauseKind.PAIRS}

    def find_sum(
        self, result: int, value: ShareFacts, is_averaged: bool
    ) -> StateOfSum | None:
        """Returns the finding if a value of the state is smaller than on one device."""
        if is_averaged and not value.is_gradient and self.is_sum(value):
            return StateOfSum(result, "", max(value.sizes))

        for total in sorted(value.totals, key=lambda total: total.line):
            summed = ShareFacts(
                Reach.REDUCED, divisors=total.divisors, sizes=total.sizes
            )
            if total.is_mean and self.is_sum(summed):
                return StateOfSum(result, total.line, max(total.sizes))
        return None

    def look_at_metric(self, place: str, metric: ShareFacts) -> None:
        """Records a metric that the step returns, or a part of one, by its place."""
        causes = metric.causes | metric.combined
        if causes:
            self._metrics.setdefault(place, set()).update(causes)

    def look_at_part(
        self,
        mark: str,
        value: Any,
        metric: ShareFacts,
        line: str,
    ) -> None:
        """Records a part of a metric object.

        Args:
            mark: One of `PARTS`.
            value: The value in the program.
            metric: The facts about it.
            line: The line of the mark.
        """
        self.look_at_metric(f"at {line}", metric)
        # The numerator of a ratio comes before its denominator.
        if mark == NUMERATOR:
            self._numerator = metric
        is_divided = mark == DENOMINATOR and self.is_sum(self._numerator)
        is_added = mark == SUMMED or is_divided
        if is_added and self._is_equal_number(value, metric):
            self._equal_sums.add(line)
        if mark == SUMMED and _is_mean(metric):
            self._sums_of_means.add(line)

    def _is_equal_number(self, value: Any, metric: ShareFacts) -> bool:
        """Returns whether a number is equal on all replicas, and no size of a share.

        The size of a share is a constant, too, and its sum is right.
        """
        if metric.reach is not Reach.EQUAL:
            return False
        number = read_real(value)
        # A number of tokens is a multiple of the number of examples.
        is_size = number and any(number % size == 0 for size in self._sizes)
        return not is_size

    def look_at_reduction(self, operand: ShareFacts, line: str, is_mean: bool) -> None:
        """Records a sum or a mean over replicas, given the facts about its operand."""
        # Means of statistics, as of batch normalization, are accepted: see `_shares`.
        causes: set[Cause] = set()
        for cause in operand.causes:
            if operand.is_gradient or cause.kind in LASTING:
                causes.add(cause)
        if causes:
            self._reductions.setdefault(line, set()).update(causes)
        elif is_mean and operand.is_gradient and self.is_sum(operand):
            self._means_of_sums[line] = max(operand.sizes)

    def is_sum(self, value: ShareFacts) -> bool:
        """Returns whether a value was summed, and divided by no number of rows."""
        is_followed = value.reach is Reach.REDUCED and value.sizes
        divisors = value.divisors
        if not is_followed or ANY in divisors:
            return False

        # The mean of parts of a batch divides by the size and by the number of parts,
        # and a mean of pairs of examples by their number. Half a square is no mean.
        sizes = {*value.sizes, *self._sizes}
        no_means = {1, 2} - value.sizes
        for divisor in {*divisors, math.prod(divisors)} - no_means:
            if any(divisor % size == 0 or size % divisor == 0 for size in sizes):
                return False
        return True


def _is_mean(metric: ShareFacts) -> bool:
    """Returns whether a number was summed over a share, and divided by its size."""
    if metric.reach is not Reach.REDUCED:
        return False
    for divisor in metric.divisors - {ANY, 1, 2}:
        if any(divisor % size == 0 for size in metric.sizes):
            return True
    return False
