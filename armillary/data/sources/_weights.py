"""The weights of a mixture, which may change at steps, and the rows they choose."""

import bisect
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

import numpy as np

from armillary.data.sources._proportions import Proportions

_EXAMPLE = "such as `weights={0: [0.7, 0.3], 1000: [0.5, 0.5]}`"


@dataclass(frozen=True)
class _Phase:
    """The rows from `start` on, up to the next phase.

    Attributes:
        start: The number of the first row.
        weights: The weight of each source.
        used: The rows of each source before this phase.
        proportions: The sources of the rows.
    """

    start: int
    weights: list[float]
    used: list[int]
    proportions: Proportions


class Schedule:
    """The source of each row of an endless order.

    Args:
        weights: The weight of each source, for each step at which they change. The
            first step is 0.
        batch_size: The rows of a step.
    """

    def __init__(self, weights: Mapping[int, list[float]], batch_size: int) -> None:
        self._phases: list[_Phase] = []
        # The first row of each phase. Weights may change at many steps.
        self._starts: list[int] = []
        for step, values in weights.items():
            start = step * batch_size
            used = [0] * len(values)
            owed: list[int] | None = None
            if self._phases:
                last = self._phases[-1]
                used = self.count(start)
                owed = last.proportions.find_owed(start - last.start)
            phase = _Phase(start, values, used, Proportions(values, owed))
            self._phases.append(phase)
            self._starts.append(start)

    @property
    def values(self) -> list[tuple[int, list[float]]]:
        """The first row and the weights of each phase."""
        return [(phase.start, phase.weights) for phase in self._phases]

    def count(self, num_rows: int) -> list[int]:
        """Returns the number of rows of each source among the first rows."""
        phase = self._phases[self._find(num_rows)]
        own = phase.proportions.count(num_rows - phase.start)
        return [before + more for before, more in zip(phase.used, own, strict=True)]

    def choose(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns the source of each row, and the number of its earlier rows.

        Both arrays have the shape `(stop - start,)`.
        """
        sources: list[np.ndarray] = []
        earlier: list[np.ndarray] = []
        begin = bisect.bisect_right(self._starts, start)
        end = bisect.bisect_left(self._starts, stop)
        bounds = [start, *self._starts[begin:end], stop]
        for first, last in itertools.pairwise(bounds):
            phase = self._phases[self._find(first)]
            own, before = phase.proportions.choose(
                first - phase.start, last - phase.start
            )
            sources.append(own)
            earlier.append(before + np.asarray(phase.used, np.int64)[own])
        return np.concatenate(sources), np.concatenate(earlier)

    def _find(self, row: int) -> int:
        return bisect.bisect_right(self._starts, row) - 1


def check_weights(weights: Any, names: Sequence[str]) -> dict[int, list[float]]:
    """Returns the weights in the order of `names`, for each step at which they change.

    Raises:
        TypeError: If `weights` is neither a list, nor a dictionary by name or by step.
        ValueError: If steps or weights are wrong.
    """
    is_by_step = isinstance(weights, Mapping) and not _has_names(weights, names)
    by_step = weights if is_by_step else {0: weights}
    wrong = [step for step in by_step if not _is_step(step)]
    if wrong:
        raise ValueError(
            f"`weights` has the key {wrong[0]!r}, but its keys must be the sources "
            f"({', '.join(names)}), or the steps from which weights are used, "
            f"{_EXAMPLE}."
        )
    steps = [int(step) for step in by_step]
    is_rising = all(a < b for a, b in itertools.pairwise(steps))
    if not steps or steps[0] != 0 or not is_rising:
        raise ValueError(
            f"`weights` has weights for the steps {steps}, but the first step must be "
            f"0, and the others must rise, {_EXAMPLE}."
        )

    found: dict[int, list[float]] = {}
    for step, values in zip(steps, by_step.values(), strict=True):
        name = f"weights[{step}]" if is_by_step else "weights"
        found[step] = _check_values(values, names, name)
    return found


def _has_names(weights: Mapping[Any, Any], names: Sequence[str]) -> bool:
    return any(isinstance(key, str) for key in weights) or set(weights) == set(names)


def _is_step(step: Any) -> bool:
    is_int = isinstance(step, Integral) and not isinstance(step, bool)
    return is_int and int(step) >= 0


def _check_values(values: Any, names: Sequence[str], name: str) -> list[float]:
    """Returns a weight for each source."""
    listed = ", ".join(names)
    if isinstance(values, Mapping):
        if set(values) != set(names):
            raise ValueError(
                f"`{name}` has the sources {', '.join(map(str, values))}, but "
                f"`sources` has {listed}. Write a weight for each of them; a source "
                "with weight 0 is not read."
            )
        values = [values[source] for source in names]
    elif isinstance(values, np.ndarray):
        values = values.tolist()
    is_list = isinstance(values, Sequence) and not isinstance(values, str)
    if not is_list:
        raise TypeError(
            f"`{name}` is {values!r} of type {type(values).__name__}, but it must be "
            f"a list with a weight for each source ({listed}), or a dictionary of "
            "them."
        )
    if len(values) != len(names):
        raise ValueError(
            f"`{name}` has {len(values)} weights, but there are {len(names)} sources "
            f"({listed}). Write one for each of them; a source with weight 0 is not "
            "read."
        )
    wrong = [value for value in values if not _is_weight(value)]
    if wrong or not any(values):
        shown = f"{wrong[0]!r:.80}" if wrong else "no weight above 0"
        raise ValueError(
            f"`{name}` has {shown}, but weights must be numbers that are not negative, "
            f"and at least one must be above 0. Write shares of the rows, {_EXAMPLE}."
        )
    return [float(value) for value in values]


def _is_weight(value: Any) -> bool:
    if not isinstance(value, Real) or isinstance(value, bool):
        return False
    try:
        number = float(value)
    except OverflowError:
        return False
    return math.isfinite(number) and number >= 0
