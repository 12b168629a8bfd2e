"""Finds numbers in the state that count the examples of one replica.

A step sees one replica's share of a batch, so `state["seen"] + x.shape[0]` counts the
share and not the batch. The program shows it: a number of the state grows by a constant
that is the size of a share.
"""

import itertools
import operator
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from jax.extend import core

from armillary._dataflow import Dataflow, union
from armillary._jax_compat import read_real
from armillary._jaxpr import IDENTITIES, programs_in, walk_equations

_COPIES = (*IDENTITIES, "convert_element_type")
_SUMS = ("add", "add_any")
# The place in a ring: `(place + size) % num_rows`, or a choice with `jnp.where`.
_OF_RINGS = ("rem", "select_n")


class ShareCounter(NamedTuple):
    """A number of the state that grows by the size of a share.

    Attributes:
        slot: The number of the input.
        size: The size that it grows by.
        line: The line of the sum.
    """

    slot: int
    size: int
    line: str


def find_counters(
    program: core.ClosedJaxpr, is_split: Sequence[bool]
) -> list[ShareCounter]:
    """Returns the numbers of the state that grow by the size of a share.

    Args:
        program: The program of one replica.
        is_split: For each input, whether it is a part of a batch, examples first.
    """
    sizes: set[int] = set()
    inputs: list[frozenset[ShareCounter]] = []
    for slot, variable in enumerate(program.jaxpr.invars):
        shape = variable.aval.shape
        is_own = is_split[slot]
        if is_own and shape and shape[0] > 1:
            # The number of examples, of tokens, and so on.
            sizes.update(itertools.accumulate(shape, operator.mul))
        is_number = not is_own and not shape
        counter = ShareCounter(slot, size=0, line="")
        inputs.append(frozenset({counter} if is_number else ()))

    # Most steps have no such sum, so the analysis need not run.
    growths = map(_grows_by, walk_equations(program))
    if sizes.isdisjoint(growths):
        return []
    results = _CounterDataflow().run(program, inputs)
    found = union(results)
    return sorted(counter for counter in found if counter.size in sizes)


class _CounterDataflow(Dataflow[frozenset[ShareCounter]]):
    """Follows the numbers of the state through one sum with a constant."""

    nothing = frozenset()

    def join(self, facts: Iterable[frozenset[ShareCounter]]) -> frozenset[ShareCounter]:
        return union(facts)

    def transfer(
        self, equation: Any, operands: list[frozenset[ShareCounter]]
    ) -> list[frozenset[ShareCounter]] | None:
        """Follows a number of the state through copies, and through one sum."""
        name = equation.primitive.name
        if any(programs_in(equation)) or name in _COPIES:
            return None
        if name in _OF_RINGS:
            # The first operand of a choice is the condition, and the second operand of
            # a remainder is the number of rows.
            values = operands[1:] if name == "select_n" else operands[:1]
            counters = self.join(values)
            # Before the sum, a choice gives each replica its part of a total.
            return [frozenset(counter for counter in counters if counter.size)]

        size = _grows_by(equation)
        if size is None:
            return [self.nothing] * len(equation.outvars)
        grown: set[ShareCounter] = set()
        line = self.line(equation)
        for counter in self.join(operands):
            is_before_sum = counter.size == 0
            if is_before_sum:
                grown.add(ShareCounter(counter.slot, size, line))
        return [frozenset(grown)]


def _grows_by(equation: Any) -> int | None:
    """Returns the whole number that a sum adds to something else, if it is one."""
    if equation.primitive.name not in _SUMS:
        return None
    found = map(read_real, equation.invars)
    numbers = [number for number in found if number is not None]
    is_whole = len(numbers) == 1 and numbers[0].is_integer()
    return int(numbers[0]) if is_whole else None
