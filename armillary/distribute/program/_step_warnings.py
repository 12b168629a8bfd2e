"""Warns of constant random numbers, and of values that metrics must not add up."""

import math
from collections.abc import Iterable
from typing import Any, TypeAlias

from armillary._dataflow import Dataflow, union
from armillary._jax_compat import read_number
from armillary._logging import logger
from armillary.distribute.analysis._operations import DRAWS
from armillary.distribute.program._traced_step import TracedStep
from armillary.distribute.replica._context import get_strategy
from armillary.distribute.replica._policy import Policy, policies_of
from armillary.state._lift import State


def warn_of_draws(name: str, step: TracedStep) -> None:
    """Warns of random numbers that depend on neither state nor batch."""
    draws = _ConstantDraws()
    draws.run(step.program, [True] * len(step.program.in_avals))
    if draws.lines:
        logger.warning(
            f"`{name}` draws random numbers from a key that is a constant, so they are "
            f"the same in each step ({draws.lines[0]}). Draw from an `nnx.Rngs` that "
            "the trainer holds (`jax.random.normal(rngs(), shape)`). If you need a "
            "constant, make it before the step."
        )


class _ConstantDraws(Dataflow[bool]):
    """Finds draws from keys that are constants.

    The fact of a value is True if it is not a constant.
    """

    nothing = False

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def join(self, facts: Iterable[bool]) -> bool:
        return any(facts)

    def mix(self, equation: Any, operands: list[bool]) -> bool:
        if equation.primitive.name in DRAWS and not operands[0]:
            self.lines.append(self.line(equation))
        return any(operands)


class MetricWarnings:
    """Warns once if a metric of a step has values that must not be added up."""

    def __init__(
        self, name: str, num_replicas: int, *, is_evaluation: bool = False
    ) -> None:
        self._name = name
        self._num_replicas = num_replicas
        self._is_evaluation = is_evaluation
        self._means: list[tuple[str, str]] = []
        self._batches: set[Any] = set()
        self._is_done = num_replicas == 1 and not is_evaluation

    def check(self, state: State, step: TracedStep, active: Any = None) -> None:
        """Checks a program of the step, for batches on the `active` replicas."""
        if self._is_done:
            return
        num_slots = len(state.paths)
        slot_types = step.program.in_avals[:num_slots]
        batch_types = step.program.in_avals[num_slots:]
        # The first axes of a batch: the replicas, if it has them, and the examples.
        num_axes = 2 if get_strategy().layout.stacked else 1
        sizes = [aval.shape[:num_axes] for aval in batch_types]
        self._batches.add((active, *sizes))

        policies = policies_of(state, slot_types)
        summed = {i for i in step.changed if policies[i] is Policy.SUM}
        if not summed:
            return

        extremes = self._find_additions(state, step, summed)
        is_uneven = self._is_evaluation and len(self._batches) > 1
        if extremes and self._num_replicas == 1:
            return  # Nothing is added up.
        if extremes:
            self._warn_of_extreme(*extremes[0])
            self._is_done = True
        elif self._means and is_uneven:
            self._warn_of_mean(*self._means[0])
            self._is_done = True

    def _find_additions(
        self, state: State, step: TracedStep, summed: set[int]
    ) -> list[tuple[str, str]]:
        """Keeps the means that are added to metrics, and returns the extremes.

        Both are pairs of the path of a metric and a line.
        """
        inputs: list[_Facts] = [frozenset()] * len(step.program.in_avals)
        for i in summed:
            inputs[i] = frozenset({_HELD})
        results = _Additions().run(step.program, inputs)

        extremes: list[tuple[str, str]] = []
        # The results begin with the changed state.
        for i, facts in zip(step.changed, results, strict=False):
            if i not in summed:
                continue
            path = state.paths[i]
            for kind, line in facts:
                if kind == "extreme":
                    extremes.append((path, line))
                elif kind == "mean":
                    self._means.append((path, line))
        return extremes

    def _warn_of_extreme(self, metric: str, line: str) -> None:
        logger.warning(
            f"`{self._name}` keeps a maximum or minimum in the metric {metric} "
            f"({line}), and the values of {self._num_replicas} replicas are added "
            'up. Reduce it first (`armillary.all_reduce("max", value)`), in a '
            "variable of your own (`nnx.Variable`), or outside `run`."
        )

    def _warn_of_mean(self, metric: str, line: str) -> None:
        logger.warning(
            f"`{self._name}` adds the mean of a batch to the metric {metric} "
            f"({line}), but some batches have fewer examples on a replica, so each "
            "of these examples counts more than others. Update the metric with one "
            "value for each example."
        )


_Facts: TypeAlias = frozenset[tuple[str, str]]
_HELD = ("held", "by a metric")


class _Additions(Dataflow[_Facts]):
    """Follows the values that are added to metrics.

    A fact is `held`, for the value of a metric, or `sum`, with the number of values in
    a sum. It is `mean` for a mean of examples, or `extreme` for the maximum or minimum
    of a metric and another value, each with its line.
    """

    nothing: _Facts = frozenset()

    def join(self, facts: Iterable[_Facts]) -> _Facts:
        return union(facts)

    def decide(self, equation: Any, decides: _Facts) -> _Facts:
        del equation, decides
        return self.nothing

    def mix(self, equation: Any, operands: list[_Facts]) -> _Facts:
        facts = self.join(operands)
        name = equation.primitive.name
        if name in ("max", "min") and _HELD in facts:
            return facts | {("extreme", self.line(equation))}

        # The sums and means of interest are numbers, and not arrays.
        sizes: list[int] = []
        for variable in equation.outvars:
            shape = getattr(variable.aval, "shape", ())  # A token has no shape.
            sizes.append(math.prod(shape))
        is_of_numbers = max(sizes, default=0) <= 1
        if not is_of_numbers:
            return frozenset(fact for fact in facts if fact[0] in ("held", "extreme"))

        if name == "reduce_sum":
            shape = equation.invars[0].aval.shape
            # With one example, the sum equals the mean.
            has_several = bool(shape) and shape[0] > 1
            if has_several:
                num_values = str(float(math.prod(shape)))  # as `read_number` writes it
                return facts | {("sum", num_values)}
        divisor = read_number(equation.invars[1]) if name == "div" else ""
        if ("sum", divisor) in facts:
            return facts | {("mean", self.line(equation))}
        return facts
