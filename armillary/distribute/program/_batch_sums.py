"""Finds plain metrics of a step that are sums over a batch, by following its program.

A plain number that a pure step returns counts as the mean over its batch. The sum of
the losses of a batch is not a mean, so a short batch, or a replica's share of a batch,
would count wrongly. The traced program shows the difference: the number is made by a
sum along the axis of the examples, and nothing divides it afterwards.

Only values that are surely such sums count. So a correct step gets no warning, and a
step that is wrong in an unusual way may get no warning either.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple, TypeAlias

import jax
from jax.core import Tracer

from armillary._dataflow import Dataflow, union
from armillary._jax_compat import read_number, read_real
from armillary._jaxpr import mark, programs_in
from armillary._logging import logger
from armillary.distribute.analysis._example_axes import axes_of_result
from armillary.distribute.analysis._marks import METRIC
from armillary.distribute.analysis._operations import ADDITIONS, COPIES

# Operations with one result for each operand, which is still a sum if the operand is.
_KEEPING_EACH = ("psum", "psum_invariant", "optimization_barrier")
# Operations whose result is still the sum.
_KEEPING = (*COPIES, "neg", "slice", "select_n", "reduce_sum")
# Parts of the names of metrics that divide a sum.
_DENOMINATORS = (
    *("denom", "weight", "normal", "count", "num", "total", "size"),
    *("tokens", "examples", "mask"),
)


class _PerExample(NamedTuple):
    """A value for each example of a batch.

    Attributes:
        axis: The axis of the examples, counted from the last one, -1.
        num_examples: The number of examples.
    """

    axis: int
    num_examples: int


class _Sum(NamedTuple):
    """A sum over the examples of a batch, and its line."""

    line: str


class _Scaled(NamedTuple):
    """A value for each example that is already scaled, or cannot be followed."""


_SCALED = frozenset({_Scaled()})
_Facts: TypeAlias = frozenset[Any]


def mark_metric(value: jax.Array, name: str) -> jax.Array:
    """Marks a plain metric in the trace of a step, for `warn_of_sums`."""
    return mark(value, METRIC + name) if isinstance(value, Tracer) else value


def warn_of_sums(step_name: str, program: Any, num_slots: int, axis: int) -> None:
    """Warns of plain metrics that are sums over the examples of a batch.

    Args:
        step_name: The name of the step, for the message.
        program: The program of the step, which takes state and batches.
        num_slots: How many inputs are state; the batches follow.
        axis: The axis of the examples.
    """
    facts: list[_Facts] = [frozenset()] * num_slots
    for array in program.in_avals[num_slots:]:
        rows: set[_PerExample] = set()
        # The sum over a single example is also its mean.
        has_several_examples = array.ndim > axis and array.shape[axis] > 1
        if has_several_examples:
            num_examples = array.shape[axis]
            rows.add(_PerExample(axis - array.ndim, num_examples))
        facts.append(frozenset(rows))

    search = _BatchSumDataflow()
    search.run(program, facts)

    sums = {name: line for name, line in search.metrics.items() if line}
    if sums:
        logger.warning("%s", _explain(step_name, sums, list(search.metrics)))


def _explain(step_name: str, sums: dict[str, str], names: list[str]) -> str:
    """Returns the question about metrics that are sums over a batch."""
    divisors = [name for name in names if _is_denominator(name)]
    dividends = [name for name in sums if name not in divisors]
    # Without a dividend, the sums are only numbers such as a count of tokens.
    is_quotient = bool(dividends)
    shown = dividends or list(sums)
    fixes = [_fix(name, divisors, is_quotient=is_quotient) for name in shown]

    places = " and ".join(f"`{name}` ({sums[name]})" for name in shown)
    found = f"{places} as a plain number, but it is a sum"
    if len(shown) > 1:
        found = f"{places} as plain numbers, but they are sums"
    return (
        f"`{step_name}` returns {found} over the examples of a batch. A plain number "
        "counts as the mean over its batch. So a sum depends on the number of "
        "replicas, and a quotient of two sums is wrong where batches differ. Write "
        f"{'; '.join(fixes)}. For the mean over examples, divide by their number in "
        "the step."
    )


def _fix(name: str, divisors: list[str], *, is_quotient: bool) -> str:
    """Returns the line to write for a metric that is a sum."""
    key = _last_part(name)
    total = f'`"{key}": armillary.metrics.Sum({key})` for a total'
    if not is_quotient:
        return total
    divisor = _last_part(divisors[0]) if divisors else "denominator"
    quotient = f"armillary.metrics.Ratio({key}, {divisor})"
    return f'`"{key}": {quotient}` for a mean, or {total}'


def _last_part(name: str) -> str:
    """Returns the key of a metric in its own dictionary, without the path before it."""
    *_, key = name.split("/")
    return key


def _is_denominator(name: str) -> bool:
    lower_name = name.lower()
    return any(part in lower_name for part in _DENOMINATORS)


class _BatchSumDataflow(Dataflow[_Facts]):
    """Follows the examples of a batch to the metrics of a step.

    Attributes:
        metrics: For each plain metric, the line of its sum; empty if it is not a sum.
    """

    nothing: _Facts = frozenset()

    def __init__(self) -> None:
        super().__init__()
        self.metrics: dict[str, str] = {}

    def join(self, facts: Iterable[_Facts]) -> _Facts:
        return union(facts)

    def decide(self, equation: Any, decides: _Facts) -> _Facts:
        del equation, decides
        return self.nothing

    def transfer(self, equation: Any, operands: list[_Facts]) -> list[_Facts] | None:
        name = equation.primitive.name
        if name == "name":
            self._note_metric(equation.params["name"], operands[0])
            return operands
        if name in _KEEPING_EACH:
            return operands
        if any(programs_in(equation)):
            return None
        return [self._mix(equation, operands, made) for made in equation.outvars]

    def _note_metric(self, mark_name: str, facts: _Facts) -> None:
        """Records the line of a plain metric's sum, or that the metric is not a sum."""
        if not mark_name.startswith(METRIC):
            return
        name = mark_name.removeprefix(METRIC)
        lines = [fact.line for fact in facts if isinstance(fact, _Sum)]
        has_only_sums = bool(lines) and len(lines) == len(facts)
        self.metrics[name] = min(lines) if has_only_sums else ""

    def _mix(self, equation: Any, operands: list[_Facts], made: Any) -> _Facts:
        """Returns the facts of the result `made` of an operation without programs."""
        facts = self.join(operands)
        if not facts:
            return self.nothing

        is_scaled = bool(facts & _SCALED)
        has_sum = any(isinstance(fact, _Sum) for fact in facts)
        has_rows = any(isinstance(fact, _PerExample) for fact in facts)
        is_mixed = has_sum and has_rows
        if is_scaled or is_mixed:
            return _SCALED
        if has_sum:
            return self._mix_sums(equation, operands)
        return self._mix_rows(equation, operands, made)

    def _mix_sums(self, equation: Any, operands: list[_Facts]) -> _Facts:
        """Returns the facts of an operation on sums, if its result is still a sum."""
        name = equation.primitive.name
        is_multiple = name == "mul" and any(map(read_number, equation.invars))
        is_added = name in ADDITIONS and all(operands)
        is_sum = name in _KEEPING or is_multiple or is_added
        return self.join(operands) if is_sum else self.nothing

    def _mix_rows(self, equation: Any, operands: list[_Facts], made: Any) -> _Facts:
        """Returns the facts of an operation on values for each example."""
        counts = {rows.num_examples for rows in self.join(operands)}
        if _divides_by(counts, equation):
            return _SCALED

        kept: set[_PerExample] = set()
        for index, facts in enumerate(operands):
            num_axes = equation.invars[index].aval.ndim
            for rows in facts:
                if rows.axis + num_axes < 0:
                    return _SCALED  # A loop takes the examples one by one.
                axis = _find_axis(equation, index, rows.axis, made)
                if axis is not None:
                    kept.add(rows._replace(axis=axis))

        if not kept:
            return self._reduce(equation)
        axes = {rows.axis for rows in kept}
        is_of_pairs = len(axes) > 1
        return _SCALED if is_of_pairs else frozenset(kept)

    def _reduce(self, equation: Any) -> _Facts:
        """Returns the facts of a result without an axis of examples."""
        name = equation.primitive.name
        is_reduction = name.startswith(("reduce_", "arg")) and "axes" in equation.params
        if name == "dot_general":
            is_scalar = not equation.outvars[0].aval.shape
            is_sum = is_scalar
        elif is_reduction:
            is_sum = name == "reduce_sum" and not self.is_backward(equation)
        else:
            return _SCALED
        if not is_sum:
            return self.nothing
        line = self.line(equation)
        return frozenset({_Sum(line)})


def _divides_by(counts: Iterable[int], equation: Any) -> bool:
    """Returns whether an operation divides by a multiple of one of these numbers."""
    name = equation.primitive.name
    if name not in ("div", "mul"):
        return False
    numbers = filter(None, map(read_real, equation.invars))
    for number in numbers:
        divisor = number if name == "div" else 1 / number
        nearest = round(divisor)
        # The reciprocal of a float32 is not exact.
        tolerance = 1e-3 * max(abs(divisor), 1)
        is_whole = abs(divisor - nearest) < tolerance
        if is_whole and any(nearest % count == 0 for count in counts):
            return True
    return False


def _find_axis(equation: Any, index: int, axis: int, made: Any) -> int | None:
    """Returns the axis of the examples in a result of an operation, if it is known.

    Args:
        equation: The operation.
        index: The number of the operand.
        axis: The axis of the examples in the operand.
        made: The result.
    """
    shape = equation.invars[index].aval.shape
    result = made.aval.shape
    if len(equation.outvars) > 1:
        # For example, `split`, `top_k` and decompositions keep the axes in front.
        place = axis + len(shape)
        found = place - len(result) if place < len(result) else None
    else:
        found = min(axes_of_result(equation, index, axis), default=None)
    if found is None or equation.primitive.name == "reshape":
        return found
    # A slice has only some of the examples, and a concatenation has more of them.
    return found if result[found] == shape[axis] else None
