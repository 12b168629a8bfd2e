"""Warns of what a traced step shows that is hardly meant, and that nothing else tells.

Numbers that are drawn from a key that no step changes are the same in each step. The
sums of metrics are those of one replica only if each adds a sum over its examples.
"""

import math
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from armillary._dataflow import Dataflow
from armillary._logging import logger
from armillary.distribute.program._trace import TracedStep
from armillary.distribute.replica._policy import Policy, policies_of
from armillary.state._lift import State

_DRAWS = ("random_bits", "random_gamma", "rng_bit_generator")


def warn_of_draws(name: str, step: TracedStep) -> None:
    """Warns of random numbers that no state and no batch decides."""
    draws = _Draws()
    draws.run(step.program, [True] * len(step.program.in_avals))
    if draws.lines:
        logger.warning(
            "`%s` draws random numbers from a key that is a constant, so they are the "
            "same in each step (%s). Draw from an `nnx.Rngs` that the trainer holds "
            "(`jax.random.normal(rngs(), shape)`), or fold the step in "
            "(`jax.random.fold_in(key, self.optimizer.step[...])`). Make a constant "
            "that is meant before the step.",
            name,
            draws.lines[0],
        )


class MetricWarnings:
    """Warns once of metrics of a step that replicas cannot add up.

    A replica's mean is one: where replicas have no data it counts less than elsewhere.
    """

    def __init__(self, name: str, num_replicas: int) -> None:
        self._name, self._num_replicas = name, num_replicas
        self._means: list[tuple[str, str]] = []
        self._is_uneven = False
        self._is_done = num_replicas == 1

    def look(self, state: State, step: TracedStep, *, is_uneven: bool) -> None:
        """Looks at one program of the step, in which replicas may have no data."""
        if self._is_done:
            return
        self._is_uneven |= is_uneven
        extremes: list[tuple[str, str]] = []
        for path, fact in _find_summed(state, step):
            places = {"mean": self._means, "extreme": extremes}.get(fact.kind, [])
            places.append((path, fact.value))
        if extremes:
            logger.warning(
                "`%s` keeps a maximum or minimum in the metric %s (%s), and those of "
                "%d replicas are added up. Reduce it first "
                '(`armillary.all_reduce("max", value)`), in a variable of your own '
                "(`nnx.Variable`), or outside `run`.",
                self._name,
                *extremes[0],
                self._num_replicas,
            )
        elif self._means and self._is_uneven:
            logger.warning(
                "`%s` adds the mean of a replica's examples to the metric %s (%s), and "
                "the batches do not divide evenly: the result depends on the number of "
                "replicas. Update the metric with one value for each example.",
                self._name,
                *self._means[0],
            )
        else:
            return
        self._is_done = True


class _Fact(NamedTuple):
    """What is known of a value, by what it was made of.

    It is `"held"` by a metric (a path), the `"sum"` of some number of values, the
    `"mean"` of examples, or an `"extreme"` of a metric and another value (lines).
    """

    kind: str
    value: str


def _find_summed(state: State, step: TracedStep) -> Iterator[tuple[str, _Fact]]:
    """Yields the paths of changed arrays that are summed, and what made them."""
    types = step.program.in_avals
    policies = policies_of(state, types[: len(state.paths)])
    summed = {i for i in step.changed if policies[i] is Policy.SUM}
    if not summed:
        return
    inputs = [
        frozenset({_Fact("held", state.paths[i])} if i in summed else ())
        for i in range(len(types))
    ]
    results = _Additions().run(step.program, inputs)
    for i, facts in zip(step.changed, results, strict=False):
        yield from ((state.paths[i], fact) for fact in facts if i in summed)


class _Draws(Dataflow[bool]):
    """Finds draws from keys that are constants; the fact is that a value is none."""

    nothing = False

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def join(self, facts: Iterable[bool]) -> bool:
        return any(facts)

    def decide(self, equation: Any, decides: bool) -> bool:
        del equation
        return decides

    def mix(self, equation: Any, operands: list[bool]) -> bool:
        if equation.primitive.name in _DRAWS and not operands[0]:
            self.lines.append(self.line(equation))
        return any(operands)


class _Additions(Dataflow[frozenset[_Fact]]):
    """Follows what is added to metrics; the mean of all examples is one number."""

    nothing = frozenset()

    def join(self, facts: Iterable[frozenset[_Fact]]) -> frozenset[_Fact]:
        return frozenset().union(*facts)

    def mix(self, equation: Any, operands: list[frozenset[_Fact]]) -> frozenset[_Fact]:
        facts, name = self.join(operands), equation.primitive.name
        shapes = [getattr(each.aval, "shape", ()) for each in equation.outvars]
        if name in ("max", "min") and any(fact.kind == "held" for fact in facts):
            return facts | {_Fact("extreme", self.line(equation))}
        if max(map(math.prod, shapes), default=0) > 1:
            return frozenset(f for f in facts if f.kind in ("held", "extreme"))
        shape = equation.invars[0].aval.shape if name == "reduce_sum" else ()
        if shape and shape[0] > 1:  # A share of one example is its own mean.
            return facts | {_Fact("sum", str(float(math.prod(shape))))}
        divisor = str(getattr(equation.invars[1], "val", "")) if name == "div" else ""
        if _Fact("sum", divisor) in facts:
            return facts | {_Fact("mean", self.line(equation))}
        return facts
