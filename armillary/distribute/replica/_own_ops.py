"""Reduces by a `CrossDeviceOps`, and proves that all replicas get the same values."""

import itertools
from collections.abc import Iterable
from typing import Any

import jax
from jax.dtypes import float0
from jax.extend import core

from armillary._jaxpr import mark
from armillary.distribute.analysis._marks import MADE_BY_OPS
from armillary.distribute.analysis._sameness import Sameness
from armillary.distribute.replica._values import ReduceOp
from armillary.errors import ReplicaMismatchError

_NAMES = {kind: name for name, kind in MADE_BY_OPS.items()}


def reduce_by(
    ops: Any,
    op: ReduceOp,
    values: list[Any],
    axis_name: str,
    num_replicas: int,
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

            def reduce_extreme(values: Any) -> Any:
                return by_order(values, axis_name)

            # JAX raises an error here, because these have no derivative.
            return jax.jvp(reduce_extreme, primals, tangents)

        # A sum is linear. Its derivative uses XLA's own sum, which JAX can transpose.
        # The user's operations may have no transpose.
        is_float = [change.dtype != float0 for change in changes]
        floats = list(itertools.compress(changes, is_float))
        sums = iter(jax.lax.psum(floats, axis_name))
        totals: list[Any] = []
        for change, has_sum in zip(changes, is_float, strict=True):
            totals.append(next(sums) if has_sum else change)
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
    return ", ".join(f"{array.dtype}{list(array.shape)}" for array in arrays)


def _check_same(
    ops: Any,
    program: core.ClosedJaxpr,
    axis_name: str,
    num_replicas: int,
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
