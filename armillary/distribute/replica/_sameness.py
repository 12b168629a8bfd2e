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
import itertools
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, TypeAlias

import jax
from jax.core import Tracer
from jax.dtypes import float0
from jax.extend import core

from armillary._jaxpr import mark, named_axes
from armillary.distribute.replica._dataflow import ReplicaDataflow
from armillary.distribute.replica._marks import MADE_BY_OPS
from armillary.distribute.replica._operations import (
    REDUCTIONS,
    SCATTERS,
    has_collective,
)
from armillary.distribute.replica._values import ReduceOp
from armillary.errors import ReplicaMismatchError

Classes: TypeAlias = tuple[int, ...]

_NAMES = {kind: name for name, kind in MADE_BY_OPS.items()}


def reduce_by(
    ops: Any, op: ReduceOp, values: list[Any], axis_name: str, num_replicas: int
) -> Any:
    """Reduces arrays by a `CrossDeviceOps`, and proves that the results are equal.

    The operations of `ops` become one equation of the step's program. Its results carry
    a mark, which `_proof` trusts, so that it treats the equation as one reduction.

    Args:
        ops: The `CrossDeviceOps`.
        op: The operation of `all_reduce`. A mean is a sum here, which the caller
            divides.
        values: This replica's arrays.
        axis_name: The axis of replicas.
        num_replicas: At least 2.

    Raises:
        ReplicaMismatchError: If the results may differ between replicas.
        ValueError: If the results have other shapes or dtypes than `values`.
    """
    asked = ReduceOp.SUM if op is ReduceOp.MEAN else op
    name = _NAMES[op.value.lower()]

    def call_ops(values: list[Any]) -> Any:
        return ops.reduce(asked, values)

    # A call of a function with a derivative stays one equation of the program.
    @jax.custom_jvp
    def reduce(values: list[Any]) -> list[Any]:
        program, shapes = jax.make_jaxpr(call_ops, return_shape=True)(values)
        _check_results(ops, values, shapes)
        _check_same(ops, program, axis_name, num_replicas)
        results = core.jaxpr_as_fun(program)(*values)
        return [mark(result, name) for result in results]

    @reduce.defjvp
    def derivative(primals: Any, tangents: Any) -> Any:
        [parts] = primals
        [changes] = tangents
        if asked is not ReduceOp.SUM:
            by_order = jax.lax.pmax if asked is ReduceOp.MAX else jax.lax.pmin
            # JAX raises an error here, because these have no derivative.
            return jax.jvp(lambda parts: by_order(parts, axis_name), primals, tangents)
        # A sum is linear. Its derivative uses XLA's own sum, which JAX can transpose.
        # The user's operations may have no transpose.
        is_float = [change.dtype != float0 for change in changes]
        own = list(itertools.compress(changes, is_float))
        sums = iter(jax.lax.psum(own, axis_name))
        pairs = zip(changes, is_float, strict=True)
        totals = [next(sums) if has_sum else zero for zero, has_sum in pairs]
        return reduce(parts), totals

    return reduce(values)


def _check_results(ops: Any, values: list[Any], found: Any) -> None:
    """Raises unless the results have the shapes and dtypes of the values."""
    leaves = jax.tree.leaves(found)
    kinds = [(leaf.shape, leaf.dtype) for leaf in leaves]
    expected = [(value.shape, value.dtype) for value in values]
    if kinds != expected:
        raise ValueError(
            f"`reduce` of {ops!r} made {_describe(leaves)} of {_describe(values)}. "
            "Return one array for each array of `values`, of the same shape and dtype."
        )


def _describe(arrays: Iterable[Any]) -> str:
    return ", ".join(f"{each.dtype}{list(each.shape)}" for each in arrays)


def _check_same(
    ops: Any, program: core.ClosedJaxpr, axis_name: str, num_replicas: int
) -> None:
    """Raises if results may differ, or if some replicas would wait forever."""
    analysis = Sameness(axis_name, num_replicas)
    inputs = [analysis.different] * len(program.jaxpr.invars)
    results = analysis.find(program, inputs)
    for line in analysis.waits[:1]:
        raise ReplicaMismatchError(
            f"`reduce` of {ops!r} has a branch or loop with a collective inside (at "
            f"{line}), but only some replicas may take it, and these would wait there "
            "forever. Reduce the value that decides first, or choose with `jnp.where`."
        )
    differing = [i for i, classes in enumerate(results) if set(classes) != {0}]
    if differing:
        raise ReplicaMismatchError(
            f"`reduce` of {ops!r} may leave different values on the replicas "
            f"({len(differing)} of {len(results)} results), but `all_reduce` must give "
            "every replica the same values. End with a collective over all replicas, "
            "such as\n"
            f'  parts = jax.lax.all_gather(value, "{axis_name}")\n'
            "  total = jnp.sum(parts, axis=0)\n"
            f'or `jax.lax.psum(value, "{axis_name}")`.'
        )


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
        # An array that was captured from the step may differ between replicas.
        variables = [*program.jaxpr.constvars, *program.jaxpr.invars]
        constants = [
            self.different if isinstance(constant, Tracer) else self.nothing
            for constant in program.consts
        ]
        jaxpr = program.jaxpr.replace(constvars=[], invars=variables)
        return self.run(core.ClosedJaxpr(jaxpr, ()), [*constants, *inputs])

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
        if len(operands) == len(equation.outvars):
            return list(map(follow, operands))
        return [follow(self.join(operands))] * len(equation.outvars)

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
        senders = {to: sender for sender, to in permutation}
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
    return tuple(first.setdefault(value, i) for i, value in enumerate(values))
