"""What becomes of the values of all replicas: one value, one array, or a list."""

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.core import Tracer

from armillary.data._layout import hosted_replicas
from armillary.distribute._global_arrays import everywhere
from armillary.distribute.replica._values import (
    ReduceOp,
    check_axis,
    is_per_replica,
    join,
)
from armillary.errors import DoubleReductionError
from armillary.typing import PyTree

if TYPE_CHECKING:
    from armillary.distribute._strategy import Strategy

_REDUCE = {
    ReduceOp.SUM: jnp.sum,
    ReduceOp.MEAN: jnp.mean,
    ReduceOp.MAX: jnp.max,
    ReduceOp.MIN: jnp.min,
}


def reduce_values(
    strategy: "Strategy", reduce_op: ReduceOp | str, value: PyTree, axis: int | None
) -> PyTree:
    """Returns `Strategy.reduce` of values that this process can read."""
    op, count = ReduceOp.of(reduce_op), strategy.num_replicas_in_sync

    def reduce_leaf(leaf: Any) -> Any:
        if is_per_replica(leaf):
            if leaf.is_shared and op is ReduceOp.SUM and leaf.num_active > 1:
                raise DoubleReductionError(
                    "`strategy.reduce` was asked for the sum of a value that is equal "
                    f"on all {leaf.num_active} replicas: it was reduced in the step, or"
                    " no argument of `strategy.run` is a batch. Use the value as it is "
                    "(ReduceOp.MEAN), or pass batches of `strategy.distribute_dataset("
                    "...)`, of which each replica gets its share."
                )
            rows = leaf.active
            if axis is None:
                return _REDUCE[op](rows, 0)
            ndim = rows.ndim - 1
            if not -ndim <= axis < ndim:
                raise ValueError(
                    f"`axis` is {axis}, but the value of each replica has {ndim} axes. "
                    "Use an axis it has, or `axis=None` to reduce over replicas only."
                )
            return _REDUCE[op](rows, (0, 1 + axis % ndim))
        if op is ReduceOp.SUM and count > 1:
            if isinstance(leaf, int | float) and leaf == 0:
                return leaf
            raise ValueError(
                f"`value` is {leaf!r}, which is not a per-replica value, so "
                f"ReduceOp.SUM over {count} replicas has no meaning. Pass what "
                "`strategy.run` returned, or use ReduceOp.MEAN."
            )
        return leaf if axis is None else _REDUCE[op](leaf, axis)

    return jax.tree.map(reduce_leaf, value, is_leaf=is_per_replica)


def gather_values(strategy: "Strategy", value: PyTree, axis: int) -> PyTree:
    """Returns `Strategy.gather` of values that this process can read."""
    check_axis(axis)

    def gather_leaf(leaf: Any) -> Any:
        if not is_per_replica(leaf):
            return leaf
        whole = join(leaf, axis)
        is_part = leaf.num_active < leaf.stacked.shape[0]
        if strategy.mesh is None or not (is_part and isinstance(whole, Tracer)):
            return whole
        # XLA may divide a few rows in a way that JAX 0.9 has no sharding for.
        return jax.lax.with_sharding_constraint(whole, everywhere(strategy.mesh))

    return jax.tree.map(gather_leaf, value, is_leaf=is_per_replica)


def list_values(strategy: "Strategy", value: PyTree) -> tuple[PyTree, ...]:
    """Returns `Strategy.local_results`."""
    leaves, treedef = jax.tree.flatten(value, is_leaf=is_per_replica)
    rows: list[list[Any] | None] = []
    for leaf in leaves:
        if not is_per_replica(leaf):
            rows.append(None)
            continue
        parts = leaf.parts()
        if strategy.peers is not None:
            layout, count = strategy.layout, leaf.shared_by or len(leaf.array)
            local = hosted_replicas(layout.local_replicas, layout.num_replicas, count)
            parts = {i: part for i, part in parts.items() if i in local}
        rows.append(list(parts.values()))
    num_values = min((len(row) for row in rows if row is not None), default=1)
    pairs = list(zip(leaves, rows, strict=True))
    return tuple(
        treedef.unflatten(leaf if row is None else row[i] for leaf, row in pairs)
        for i in range(num_values)
    )
