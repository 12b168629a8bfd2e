"""The methods of a strategy that combine the values of its replicas."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer

from armillary._traceback import hides_frames
from armillary.data._layout import hosted_replicas
from armillary.distribute._global_arrays import everywhere
from armillary.distribute._placed import Placed
from armillary.distribute.replica._context import (
    get_running_context,
    lifted_state,
    require_cross_replica_context,
)
from armillary.distribute.replica._values import (
    PerReplica,
    ReduceOp,
    check_axis,
    concatenate,
    is_per_replica,
)
from armillary.errors import DoubleReductionError
from armillary.typing import PyTree

_REDUCE = {
    ReduceOp.SUM: jnp.sum,
    ReduceOp.MEAN: jnp.mean,
    ReduceOp.MAX: jnp.max,
    ReduceOp.MIN: jnp.min,
}


class ValueMethods(Placed):
    """The part of a strategy that reduces, joins and separates per-replica values."""

    @hides_frames
    def reduce(
        self, reduce_op: ReduceOp | str, value: PyTree, axis: int | None = None
    ) -> PyTree:
        """Combines the values of all replicas into one, the same in every process.

        All processes of the strategy must call it.

        Args:
            reduce_op: A `ReduceOp`, or its name.
            value: A pytree of `PerReplica` values, as `run` returns them.
            axis: An axis of each replica's value to reduce as well, such as 0 for
                examples. The mean is then over all examples.

        Returns:
            The same pytree with one array for each `PerReplica`.

        Raises:
            PeerError: If a value that replicas share differs between processes.
            ReplicaContextError: In replica context, or in another strategy's scope.
            DoubleReductionError: If `reduce_op` is SUM, but `run` returned equal values
                on all replicas, such as gradients.
            ValueError: If `reduce_op` is SUM over several replicas, but a leaf is not a
                `PerReplica`.
        """
        require_cross_replica_context(
            "strategy.reduce", "use `get_replica_context().all_reduce` there", self
        )
        if axis is not None:
            check_axis(axis)
        op = ReduceOp.of(reduce_op)
        count = self.num_replicas_in_sync
        replica = get_running_context(self)

        def reduce_leaf(leaf: Any) -> Any:
            if not is_per_replica(leaf):
                if op is ReduceOp.SUM and count > 1:
                    raise ValueError(
                        f"`value` is {leaf!r}, which is not a per-replica value, so "
                        f"ReduceOp.SUM over {count} replicas has no meaning. Pass the "
                        "result of `strategy.run`, or use ReduceOp.MEAN."
                    )
                return leaf if axis is None else _REDUCE[op](leaf, axis)
            if replica is not None and leaf.own is not None:
                return replica.reduce_merged(op, leaf, axis)
            is_whole = leaf.is_shared and not leaf.is_part
            if is_whole and op is ReduceOp.SUM and leaf.num_active > 1:
                raise DoubleReductionError(
                    "`strategy.reduce` was called with SUM for a value that is equal "
                    f"on all {leaf.num_active} replicas: it was reduced in the step, "
                    "or does not depend on the batch. Use the value itself "
                    "(ReduceOp.MEAN). To count over replicas, use "
                    '`all_reduce("sum", n)` within `run`.'
                )
            if axis is None:
                return _REDUCE[op](leaf.active, 0)
            # The replicas are the first axis, before the axes of each value.
            place = axis if axis < 0 else 1 + axis
            return _REDUCE[op](leaf.active, (0, place))

        return self._combine(reduce_leaf, value)

    @hides_frames
    def gather(self, value: PyTree, axis: int) -> PyTree:
        """Joins the values of all replicas along an axis, the same in every process.

        All processes of the strategy must call it.

        Args:
            value: A pytree of `PerReplica` values.
            axis: The axis of each replica's value to join, such as 0 for examples.

        Returns:
            The same pytree with one array for each `PerReplica`.

        Raises:
            PeerError: If a value that replicas share differs between processes.
            ReplicaContextError: In replica context, or in another strategy's scope.
            ValueError: If a value has no such axis.
        """
        require_cross_replica_context(
            "strategy.gather", "use `get_replica_context().all_gather` there", self
        )
        check_axis(axis)

        def gather_leaf(leaf: Any) -> Any:
            if not is_per_replica(leaf):
                return leaf
            whole = concatenate(leaf, axis)
            is_part = leaf.num_active < leaf.stacked.shape[0]
            is_traced_part = is_part and isinstance(whole, Tracer)
            if self.mesh is None or not is_traced_part:
                return whole
            # XLA may divide a few rows in a way that no sharding of JAX 0.9 describes.
            return jax.lax.with_sharding_constraint(whole, everywhere(self.mesh))

        return self._combine(gather_leaf, value)

    def local_results(self, value: PyTree) -> tuple[PyTree, ...]:
        """Returns a tuple with the value of each replica of this process.

        Each part of a `PerReplica` is on its replica's device. To compute with several
        parts, use `reduce` or `gather`, or fetch them (`jax.device_get`).

        Args:
            value: A pytree of `PerReplica` values; other leaves are in every entry.

        Returns:
            One pytree for each replica of this process that holds data.
        """
        leaves, treedef = jax.tree.flatten(value, is_leaf=is_per_replica)
        # The parts of each leaf by number; `None` for a leaf that is in every entry.
        parts_of: list[list[Any] | None] = []
        counts: list[int] = []
        for leaf in leaves:
            parts = self._local_parts(leaf) if is_per_replica(leaf) else None
            parts_of.append(parts)
            if parts is not None:
                counts.append(len(parts))

        results: list[PyTree] = []
        for number in range(min(counts, default=1)):
            own: list[Any] = []
            for leaf, parts in zip(leaves, parts_of, strict=True):
                own.append(leaf if parts is None else parts[number])
            results.append(treedef.unflatten(own))
        return tuple(results)

    def _local_parts(self, value: PerReplica) -> list[Any]:
        """Returns the parts of a value that are in this process."""
        parts = value.parts()
        layout = self.layout
        if layout.peers.is_alone:
            return list(parts.values())
        count = value.shared_by or len(value.array)
        local = hosted_replicas(layout.local_replicas, layout.num_replicas, count)
        return [part for i, part in parts.items() if i in local]

    def _collect(self, value: PyTree) -> PyTree:
        """Returns values of all processes as arrays of this process."""
        return value

    def _combine(self, combine: Callable[[Any], Any], value: PyTree) -> PyTree:
        """Combines the values of several devices, on the devices of the variables."""
        with self.leave_program_mesh():
            collected = self._collect(value)
            result = jax.tree.map(combine, collected, is_leaf=is_per_replica)
            self.dispatch.finish(result)
            if self.home is None or lifted_state() is not None:
                return result

            def bring_home(leaf: Any) -> Any:
                is_here = isinstance(leaf, jax.Array) and not isinstance(leaf, Tracer)
                return jax.device_put(leaf, self.home) if is_here else leaf

            return jax.tree.map(bring_home, result)
