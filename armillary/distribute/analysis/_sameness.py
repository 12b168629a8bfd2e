"""Proves which replicas hold the same value, for collectives over groups of replicas.

A fact about a value has one class for each replica. Replicas with the same class hold
the same value. For example, with 4 replicas, `(0, 0, 0, 0)` is a value that is equal on
all replicas. With `(0, 1, 0, 1)`, replicas 0 and 2 share a value, and so do replicas 1
and 3. A class has the number of its first replica.

`_proof` follows a whole step, and its facts are only "equal" and "different". That is
enough for a reduction over all replicas. Inside a `CrossDeviceOps`, a reduction in
groups of neighbors may come before a reduction across the groups, and this analysis is
for that.
"""

import functools
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, TypeAlias

from jax.core import Tracer
from jax.extend import core

from armillary._jaxpr import named_axes
from armillary.distribute.analysis._operations import (
    REDUCTIONS,
    SCATTERS,
    has_collective,
)
from armillary.distribute.analysis._replica_dataflow import ReplicaDataflow

Classes: TypeAlias = tuple[int, ...]


class Sameness(ReplicaDataflow[Classes]):
    """Follows which replicas hold the same value.

    Attributes:
        different: The fact of a value that may differ on all replicas.
        waits: Lines of branches that replicas may take differently, with collectives.
    """

    def __init__(self, axis_name: str, num_replicas: int) -> None:
        self.different = tuple(range(num_replicas))
        self.nothing = (0,) * num_replicas
        self.waits: list[str] = []
        super().__init__(axis_name)

    def find(
        self, program: core.ClosedJaxpr, inputs: Sequence[Classes]
    ) -> list[Classes]:
        """Returns the facts of a program's results."""
        constants: list[Classes] = []
        for constant in program.consts:
            # An array that was captured from the step may differ between replicas.
            is_captured = isinstance(constant, Tracer)
            constants.append(self.different if is_captured else self.nothing)

        # The constants become inputs, because inputs have facts of their own.
        variables = [*program.jaxpr.constvars, *program.jaxpr.invars]
        jaxpr = program.jaxpr.replace(constvars=[], invars=variables)
        without_constants = core.ClosedJaxpr(jaxpr, ())
        return self.run(without_constants, [*constants, *inputs])

    def join(self, facts: Iterable[Classes]) -> Classes:
        """Returns the joint fact: two replicas are equal if they are in every fact."""
        several = set(facts)
        if not several:
            return self.nothing
        return _number(zip(*several, strict=True))

    def decide(self, equation: Any, decides: Classes) -> Classes:
        if decides != self.nothing and has_collective(equation):
            self.waits.append(self.line(equation))
        return decides

    def follow_reduction(
        self, equation: Any, operands: list[Classes], by_ops: str
    ) -> list[Classes]:
        del operands, by_ops
        return [self.nothing] * len(equation.outvars)

    def follow_source(self, equation: Any, operands: list[Classes]) -> Classes:
        del equation, operands
        return self.different

    def follow_exchange(self, equation: Any, operands: list[Classes]) -> list[Classes]:
        if self.axis_name not in named_axes(equation):
            return [self.join(operands)] * len(equation.outvars)

        follow = self._rule(equation)
        num_results = len(equation.outvars)
        if len(operands) == num_results:
            return list(map(follow, operands))
        return [follow(self.join(operands))] * num_results

    def _rule(self, equation: Any) -> Callable[[Classes], Classes]:
        """Returns a function from the fact of an operand to the fact of the result."""
        name = equation.primitive.name
        if name == "ppermute":
            return functools.partial(self._permute, equation.params["perm"])
        if name.startswith((*REDUCTIONS, *SCATTERS)):
            # Without groups, this is a scatter over all replicas.
            groups = equation.params.get("axis_index_groups") or [self.different]
            gets_part = name.startswith(SCATTERS)
            return functools.partial(self._reduce_groups, groups, gets_part)
        return lambda classes: self.different

    def _permute(
        self, permutation: Iterable[tuple[int, int]], classes: Classes
    ) -> Classes:
        """Returns the fact after each sender has sent its value to one receiver."""
        senders = {receiver: sender for sender, receiver in permutation}
        received: list[int | None] = []
        for replica in self.different:
            sender = senders.get(replica)
            # A replica that receives nothing gets zeros.
            received.append(None if sender is None else classes[sender])
        return _number(received)

    def _reduce_groups(
        self, groups: Sequence[Sequence[int]], gets_part: bool, classes: Classes
    ) -> Classes:
        """Returns the fact of a reduction in groups, or of a part of its result.

        Replicas with equal operands in the same order have equal results. With a
        scatter, they must also be at the same position in their groups.
        """
        results: dict[int, Hashable] = {}
        for group in groups:
            operands = tuple(classes[member] for member in group)
            for position, replica in enumerate(group):
                results[replica] = (operands, position) if gets_part else operands
        return _number(results[replica] for replica in self.different)


def _number(values: Iterable[Hashable]) -> Classes:
    """Returns the number of the first replica with an equal value, for each replica."""
    first: dict[Hashable, int] = {}
    numbers: list[int] = []
    for replica, value in enumerate(values):
        numbers.append(first.setdefault(value, replica))
    return tuple(numbers)
