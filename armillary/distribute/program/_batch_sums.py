"""Finds plain metrics of a step that are sums over a batch, by following its program.

A plain number that a pure step returns counts as the mean over its batch. The sum of
the losses of a batch is not a mean, so a short batch, or a replica's share of a batch,
would count wrongly. The traced program shows the difference: the number is made by a
sum along the axis of the examples, and nothing divides it afterwards.

Only values that are surely such sums count. So a correct step gets no warning, and a
step that is wrong in an unusual way may get no warning either.
"""

import math
from collections.abc import Iterable
from typing import Any, NamedTuple, TypeAlias

import jax
from jax.core import Tracer

from armillary._jax_compat import count_scan_operands, read_number, read_real
from armillary._jaxpr import Dataflow, mark, programs_in
from armillary._logging import logger
from armillary.distribute.replica._proof import METRIC

# Operations whose result is still the sum.
_COPIES = (
    *("convert_element_type", "copy", "neg", "reshape", "squeeze", "broadcast_in_dim"),
    *("transpose", "slice", "select_n", "reduce_sum", "stop_gradient", "pvary"),
    *("psum", "psum_invariant", "optimization_barrier", "sharding_constraint"),
)
_ADDITIONS = ("add", "add_any", "sub")
# Parts of the names of metrics that divide a sum.
_DENOMINATORS = (
    *("denom", "weight", "normal", "count", "num", "total", "size"),
    *("tokens", "examples", "mask"),
)


class _Rows(NamedTuple):
    """A value for each example of a batch, along an axis."""

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
    for each in program.in_avals[num_slots:]:
        has_several = each.ndim > axis and each.shape[axis] > 1
        rows = {_Rows(axis, each.shape[axis])} if has_several else ()
        facts.append(frozenset(rows))
    search = _Search()
    search.run(program, facts)
    sums = {name: line for name, line in search.metrics.items() if line}
    if sums:
        logger.warning("%s", _explain(step_name, sums, list(search.metrics)))


def _explain(step_name: str, sums: dict[str, str], names: list[str]) -> str:
    divisors = [name for name in names if _is_denominator(name)]
    dividends = [name for name in sums if name not in divisors]
    shown = dividends or list(sums)
    fixes = [_fix(name, divisors, is_quotient=bool(dividends)) for name in shown]
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
    key = name.rpartition("/")[2]
    total = f'`"{key}": armillary.metrics.Sum({key})` for a total'
    if not is_quotient:
        return total
    divisor = next(iter(divisors), "denominator").rpartition("/")[2]
    quotient = f"armillary.metrics.Ratio({key}, {divisor})"
    return f'`"{key}": {quotient}` for a mean, or {total}'


def _is_denominator(name: str) -> bool:
    return any(part in name.lower() for part in _DENOMINATORS)


class _Search(Dataflow[_Facts]):
    """Follows the examples of a batch to the metrics of a step.

    Attributes:
        metrics: For each plain metric, the line of its sum; empty if it is not a sum.
    """

    nothing: _Facts = frozenset()

    def __init__(self) -> None:
        super().__init__()
        self.metrics: dict[str, str] = {}

    def join(self, facts: Iterable[_Facts]) -> _Facts:
        return frozenset().union(*facts)

    def decide(self, equation: Any, decides: _Facts) -> _Facts:
        del equation, decides
        return self.nothing

    def transfer(self, equation: Any, operands: list[_Facts]) -> list[_Facts] | None:
        name = equation.primitive.name
        if name == "name":
            self._note(equation.params["name"], operands[0])
            return operands
        if name == "scan":
            return self._follow_shifted_scan(equation, operands)
        if any(programs_in(equation)):
            return None
        return [self._make(equation, name, operands, made) for made in equation.outvars]

    def _note(self, mark_name: str, facts: _Facts) -> None:
        if mark_name.startswith(METRIC):
            lines = [fact.line for fact in facts if isinstance(fact, _Sum)]
            is_sum = len(lines) == len(facts)
            name = mark_name.removeprefix(METRIC)
            self.metrics[name] = min(lines) if lines and is_sum else ""

    def _follow_shifted_scan(
        self, equation: Any, operands: list[_Facts]
    ) -> list[_Facts]:
        """Follows a scan, whose body has no axis for the steps of the scan."""
        num_whole, num_carry = count_scan_operands(equation)
        first = num_whole + num_carry
        inside = [*operands[:first], *(_shift(facts, -1) for facts in operands[first:])]
        results = self._follow_scan(equation, inside)
        return [
            *results[:num_carry],
            *(_shift(facts, 1) for facts in results[num_carry:]),
        ]

    def _make(
        self, equation: Any, name: str, operands: list[_Facts], made: Any
    ) -> _Facts:
        """Returns the facts of one result of an operation without programs."""
        facts = self.join(operands)
        if not facts or facts & _SCALED:
            return facts and _SCALED
        has_sum = any(isinstance(fact, _Sum) for fact in facts)
        has_rows = any(isinstance(fact, _Rows) for fact in facts)
        if has_sum and has_rows:
            return _SCALED
        if has_sum:
            return self._make_of_sums(equation, name, operands)
        if len({fact.axis for fact in facts}) > 1 and name != "dot_general":
            return _SCALED
        if _divides_by_count(equation, name, operands):
            return _SCALED
        if name == "dot_general":
            return self._make_product(equation, operands)
        (axis, num_examples), *_ = facts
        if name.startswith(("reduce_", "arg")) and "axes" in equation.params:
            return self._reduce(equation, name, axis, num_examples)
        pairs = zip(equation.invars, operands, strict=True)
        operand = next(atom.aval.shape for atom, held in pairs if held)
        place = _find_axis(equation, name, axis, operand, made.aval.shape)
        if place is None:
            return _SCALED
        return frozenset({_Rows(place, num_examples)})

    def _make_of_sums(self, equation: Any, name: str, operands: list[_Facts]) -> _Facts:
        """Returns the facts of an operation on sums, if its result is still a sum."""
        facts = self.join(operands)
        is_multiple = name == "mul" and any(map(read_number, equation.invars))
        is_added = name in _ADDITIONS and all(operands)
        return facts if name in _COPIES or is_multiple or is_added else self.nothing

    def _reduce(self, equation: Any, name: str, axis: int, num_examples: int) -> _Facts:
        axes = equation.params["axes"]
        if axis not in axes:
            before = sum(each < axis for each in axes)
            return frozenset({_Rows(axis - before, num_examples)})
        is_backward = "transpose(" in str(equation.source_info.name_stack)
        if name != "reduce_sum" or is_backward:
            return self.nothing
        return frozenset({_Sum(self.line(equation))})

    def _make_product(self, equation: Any, operands: list[_Facts]) -> _Facts:
        """Returns the facts of a product of matrices."""
        contracted, batched = equation.params["dimension_numbers"]
        made: set[Any] = set()
        num_before = len(batched[0])
        for side, (atom, facts) in enumerate(
            zip(equation.invars, operands, strict=True)
        ):
            gone = (*contracted[side], *batched[side])
            free = [axis for axis in range(atom.aval.ndim) if axis not in gone]
            for axis, num_examples in facts:
                if axis in contracted[side]:
                    is_number = not equation.outvars[0].aval.shape
                    made |= {_Sum(self.line(equation))} if is_number else set()
                elif axis in batched[side]:
                    made.add(_Rows(batched[side].index(axis), num_examples))
                else:
                    made.add(_Rows(num_before + free.index(axis), num_examples))
            num_before += len(free)
        return frozenset(made) if len(made) < 2 else _SCALED


def _shift(facts: _Facts, by: int) -> _Facts:
    """Returns the facts after `by` axes were added at the front, or removed."""
    moved = {
        fact._replace(axis=fact.axis + by) if isinstance(fact, _Rows) else fact
        for fact in facts
    }
    is_lost = any(isinstance(fact, _Rows) and fact.axis < 0 for fact in moved)
    return _SCALED if is_lost else frozenset(moved)


def _divides_by_count(equation: Any, name: str, operands: list[_Facts]) -> bool:
    """Returns whether values are divided by a multiple of the number of examples."""
    if name not in ("div", "mul"):
        return False
    numbers = [each for each in map(read_real, equation.invars) if each]
    counts = [fact.num_examples for facts in operands for fact in facts]
    for number in numbers:
        divisor = number if name == "div" else 1 / number if number else 0.0
        is_whole = abs(divisor - round(divisor)) < 1e-3 * max(abs(divisor), 1)
        if is_whole and any(round(divisor) % count == 0 for count in counts):
            return True
    return False


def _find_axis(
    equation: Any, name: str, axis: int, old: tuple[int, ...], new: tuple[int, ...]
) -> int | None:
    """Returns the new place of an axis after an operation; `None` if unknown."""
    params = equation.params
    if name == "broadcast_in_dim":
        return params["broadcast_dimensions"][axis]
    if name == "transpose":
        return params["permutation"].index(axis)
    if name == "squeeze":
        dimensions = params["dimensions"]
        is_gone = axis in dimensions
        return None if is_gone else axis - sum(each < axis for each in dimensions)
    if name == "reshape":
        return _find_reshaped(axis, old, new)
    if name == "conv_general_dilated":
        numbers = params["dimension_numbers"]
        is_batch = numbers.lhs_spec[0] == axis
        return numbers.out_spec[0] if is_batch else None
    is_kept = axis < len(new) and new[axis] == old[axis]
    return axis if is_kept else None


def _find_reshaped(axis: int, old: tuple[int, ...], new: tuple[int, ...]) -> int | None:
    """Returns the new axis that begins where the old axis began, if they overlap."""
    for place in range(len(new)):
        begins = math.prod(new[:place]) == math.prod(old[:axis])
        larger = max(new[place], old[axis])
        smaller = min(new[place], old[axis])
        if begins and smaller > 1 and larger % smaller == 0:
            return place
    return None
