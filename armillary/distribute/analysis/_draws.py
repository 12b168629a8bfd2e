"""Finds random numbers that are equal on all replicas, but used for different examples.

A key in the state is folded with the number of the replica (`_policy`). Any other key,
such as a key that the step captured, is equal on all replicas, and so are its numbers.
This is correct for numbers that all examples share, such as the noise of a parameter.
It is a mistake for numbers of single examples, such as a mask of dropout, because
examples on different replicas would share one mask.

The axes show the difference. A value that differs between replicas has an axis of
examples. If the random numbers differ along the same axis, they are a mistake.
"""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from jax.extend import core

from armillary._dataflow import union
from armillary._jaxpr import walk_equations
from armillary.distribute.analysis._example_axes import axes_of_result
from armillary.distribute.analysis._operations import DRAWS
from armillary.distribute.analysis._replica_dataflow import ReplicaDataflow


class Origin(NamedTuple):
    """The origin of a value: examples of one replica, and draws of random numbers.

    Axes are counted from the last axis, -1. So they stay the same if a loop takes a
    value apart along its first axis.

    Attributes:
        is_own: Whether the value may differ between replicas.
        examples: The axes of the examples of a replica.
        lines: The lines that drew its random numbers, if these are equal on all
            replicas.
        numbers: Pairs of such a line, and an axis along which its numbers differ.
        is_meant: Whether its key is equal on all replicas on purpose.
        is_gradient: Whether it was computed in a backward pass.
    """

    is_own: bool = False
    examples: frozenset[int] = frozenset()
    lines: frozenset[str] = frozenset()
    numbers: frozenset[tuple[str, int]] = frozenset()
    is_meant: bool = False
    is_gradient: bool = False


SHARED = Origin()
MEANT = Origin(is_meant=True)


def of_batch(num_axes: int) -> Origin:
    """Returns the origin of a share of a batch, with the examples on the first axis."""
    return Origin(is_own=True, examples=frozenset({-num_axes} if num_axes else ()))


class SharedDraw(NamedTuple):
    """A line that draws equal numbers, and a line that uses them for own examples."""

    drawn_at: str
    used_at: str


def find_shared_draws(
    program: core.ClosedJaxpr, inputs: Sequence[Origin], axis_name: str
) -> list[SharedDraw]:
    """Returns draws whose numbers are equal on all replicas, but should not be.

    Args:
        program: The program of one replica.
        inputs: The origins of its inputs.
        axis_name: The axis of replicas.
    """
    names = {equation.primitive.name for equation in walk_equations(program)}
    if names.isdisjoint(DRAWS):
        return []
    analysis = _DrawDataflow(axis_name)
    analysis.run(program, inputs)
    return sorted(analysis.found)


class _DrawDataflow(ReplicaDataflow[Origin]):
    """Follows random numbers and examples through the program of one replica.

    Attributes:
        found: The pairs of lines to warn of.
    """

    nothing = SHARED

    def __init__(self, axis_name: str) -> None:
        super().__init__(axis_name)
        self.found: set[SharedDraw] = set()

    def join(self, facts: Iterable[Origin]) -> Origin:
        several = set(facts)
        if len(several) < 2:
            return several.pop() if several else SHARED
        return Origin(
            is_own=any(origin.is_own for origin in several),
            examples=union(origin.examples for origin in several),
            lines=union(origin.lines for origin in several),
            numbers=union(origin.numbers for origin in several),
            is_meant=any(origin.is_meant for origin in several),
            is_gradient=any(origin.is_gradient for origin in several),
        )

    def decide(self, equation: Any, decides: Origin) -> Origin:
        del equation
        return Origin(is_own=decides.is_own)

    def follow_reduction(
        self, equation: Any, operands: list[Origin], by_ops: str
    ) -> list[Origin]:
        del by_ops
        return [self._reduce(equation, operand) for operand in operands]

    def follow_exchange(self, equation: Any, operands: list[Origin]) -> list[Origin]:
        del operands
        return [Origin(is_own=True)] * len(equation.outvars)

    def follow_source(self, equation: Any, operands: list[Origin]) -> Origin:
        del equation, operands
        return Origin(is_own=True)

    def follow_draw(self, equation: Any, operands: list[Origin]) -> list[Origin]:
        key = operands[0]
        return [self._draw(equation, key)] * len(equation.outvars)

    def _draw(self, equation: Any, key: Origin) -> Origin:
        """Returns the origin of random numbers that are drawn from a key."""
        if key.is_own or key.is_meant:
            return Origin(is_own=key.is_own, is_meant=key.is_meant)

        line = self.line(equation)
        shape = equation.outvars[-1].aval.shape
        numbers: set[tuple[str, int]] = set()
        for axis, size in enumerate(shape):
            if size > 1:
                from_the_last = axis - len(shape)
                numbers.add((line, from_the_last))
        return Origin(lines=frozenset({line}), numbers=frozenset(numbers))

    def _reduce(self, equation: Any, operand: Origin) -> Origin:
        """Notes a reduction of random numbers that are equal on all replicas."""
        if operand.is_own:
            return SHARED  # The result is equal on all replicas, as it should be.
        is_gathered = equation.primitive.name.startswith("all_gather")
        is_for_replicas = is_gathered or operand.is_gradient
        if is_for_replicas and not self.is_backward(equation):
            self._note(operand.lines, equation)
        return Origin(lines=operand.lines)

    def mix(self, equation: Any, operands: list[Origin]) -> Origin:
        """Returns the origin of a result; notes numbers along an axis of examples."""
        joined = self.join(operands)
        is_gradient = joined.is_gradient or self.is_backward(equation)

        # The axes of the result along which there are numbers and examples.
        numbers: set[tuple[str, int]] = set()
        examples: set[int] = set()
        for index, operand in enumerate(operands):
            for axis in operand.examples:
                examples.update(axes_of_result(equation, index, axis))
            if operand.is_own:
                continue
            for line, axis in operand.numbers:
                for new_axis in axes_of_result(equation, index, axis):
                    numbers.add((line, new_axis))

        if not joined.is_own:
            return joined._replace(numbers=frozenset(numbers), is_gradient=is_gradient)

        # A shuffle sorts random numbers, and may use the same order on all replicas.
        if equation.primitive.name != "sort":
            lines = {line for line, axis in numbers if axis in examples}
            self._note(lines, equation)
        return Origin(
            is_own=True,
            examples=frozenset(examples),
            is_meant=joined.is_meant,
            is_gradient=is_gradient,
        )

    def _note(self, lines: Iterable[str], equation: Any) -> None:
        """Notes that an operation uses numbers that these lines have drawn."""
        used_at = self.line(equation)
        self.found.update(SharedDraw(line, used_at) for line in lines)
