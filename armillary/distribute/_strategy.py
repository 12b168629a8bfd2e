"""The base of all strategies: how a step spreads over devices.

A strategy decides three things: where a step runs (`_run`), where state lives
(`state_sharding`), and where batches go (`layout`). Everything that users call is
written here once, on top of these.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, Sharding

from armillary._checks import check_callable
from armillary._traceback import hides_frames
from armillary._typing import PyTree
from armillary.cluster import ClusterResolver
from armillary.cluster._peers import Peers
from armillary.data import (
    ArrayDataset,
    BatchLayout,
    DistributedDataset,
    InputContext,
    InputOptions,
    from_arrays,
)
from armillary.distribute._collectives import double_reduction_message
from armillary.distribute._context import (
    entered,
    get_strategy,
    has_strategy,
    lifted_state,
    require_cross_replica_context,
)
from armillary.distribute._dispatch import Dispatch
from armillary.distribute._values import ReduceOp, is_per_replica
from armillary.errors import DoubleReductionError, ReplicaContextError
from armillary.state import Slot, State


class ValueContext(NamedTuple):
    """What `distribute_values_from_function` tells its function.

    Attributes:
        replica_id_in_sync_group: The replica whose value is asked for.
        num_replicas_in_sync: The number of replicas.
    """

    replica_id_in_sync_group: int
    num_replicas_in_sync: int


class Strategy:
    """Spreads one training step over devices (`tf.distribute.Strategy`).

    Use one of the subclasses. Code written against this class runs under all of them.

    Args:
        mesh: The devices, or `None` for a strategy that runs on a single one.
        num_replicas: How many copies of the step run together.
    """

    peers: Peers | None = None
    """The processes that this strategy spans; `None` for a single one."""

    def __init__(self, mesh: Mesh | None, num_replicas: int) -> None:
        self._mesh = mesh
        self._num_replicas = num_replicas
        self.dispatch = Dispatch(mesh)

    @property
    def num_replicas_in_sync(self) -> int:
        """How many copies of the step run together; divides a global batch."""
        return self._num_replicas

    @property
    def mesh(self) -> Mesh | None:
        """The mesh of devices; `None` for a strategy on a single device."""
        return self._mesh

    @property
    def cluster_resolver(self) -> ClusterResolver | None:
        """What told about the cluster; `None` for a strategy of one process."""
        return None

    @property
    def layout(self) -> BatchLayout:
        """Where the batches of a distributed dataset go."""
        raise NotImplementedError

    def state_sharding(self, slot: Slot) -> Sharding | None:
        """Returns where a slot lives between steps; `None` to leave it where it is."""
        raise NotImplementedError

    def _run(
        self,
        fn: Callable[..., PyTree],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        state: State | None,
    ) -> PyTree:
        """Runs `fn` once per replica; `state` is what an enclosing step has lifted."""
        raise NotImplementedError

    @contextlib.contextmanager
    def scope(self) -> Iterator["Strategy"]:
        """Puts this strategy in effect: a context manager.

        Code under it is in cross-replica context, and `get_strategy()` returns this
        strategy. Variables may be made inside or outside; they are placed on the
        strategy's devices when a step first uses them.

        Raises:
            ReplicaContextError: Inside `run`, or inside another strategy's scope.
        """
        require_cross_replica_context("strategy.scope", "enter the scope around `run`")
        if has_strategy() and get_strategy() is not self:
            raise ReplicaContextError(
                f"`scope` of {self!r} was entered inside the scope of "
                f"{get_strategy()!r}. One program part has one strategy: leave the "
                "other scope first."
            )
        with entered(self, None):
            yield self

    @hides_frames
    def run(
        self,
        fn: Callable[..., PyTree],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> PyTree:
        """Runs `fn` once per replica, each with its share of the batch.

        `fn` may read and write every variable that the trainer reaches; outside a
        trainer and `armillary.function`, every variable that `fn` and its arguments
        reach. Inside, gradients with respect to mirrored variables arrive summed over
        replicas.

        Args:
            fn: The function. It runs in replica context.
            args: Positional arguments. `PerReplica` values, such as batches of a
                distributed dataset, are split; other arrays are the same everywhere.
            kwargs: Keyword arguments, likewise.

        Returns:
            What `fn` returned, each array as a `PerReplica` (as it is, if there is a
            single replica without a mesh).

        Raises:
            ReplicaContextError: If called inside `run`.
            ReplicaMismatchError: If `fn` leaves a per-replica value in a mirrored slot.
            DoubleReductionError: If `fn` reduces a value that is equal on all replicas.
            TypeError: If `fn` cannot be called, or `args` is no tuple.
        """
        check_callable("fn", fn)
        if not isinstance(args, tuple | list):
            raise TypeError(
                f"`args` is {args!r} of type {type(args).__name__}, but it must be a "
                "tuple of arguments. Write `strategy.run(fn, args=(batch,))`, with the "
                "comma."
            )
        require_cross_replica_context("strategy.run", "call `fn` directly")
        return self._run(fn, tuple(args), kwargs or {}, lifted_state())

    @hides_frames
    def reduce(
        self, reduce_op: ReduceOp | str, value: PyTree, axis: int | None = None
    ) -> PyTree:
        """Combines the values of all replicas into one.

        Args:
            reduce_op: `ReduceOp.SUM` or `ReduceOp.MEAN`.
            value: A pytree of `PerReplica` values, as `run` returns them.
            axis: An axis of each replica's value to reduce as well, such as 0 for
                examples. The mean is then that of all examples.

        Returns:
            The same pytree with one array for each `PerReplica`.

        Raises:
            ReplicaContextError: In replica context.
            DoubleReductionError: If SUM is asked of values that `run` returned equal on
                all replicas, such as gradients.
            ValueError: If a leaf is not a `PerReplica` and `reduce_op` is SUM, where a
                sum over several replicas would mean nothing.
        """
        require_cross_replica_context(
            "strategy.reduce", "use `get_replica_context().all_reduce` there"
        )
        op = ReduceOp.of(reduce_op)

        def reduce_leaf(leaf: Any) -> Any:
            if is_per_replica(leaf):
                if leaf.is_shared and op is ReduceOp.SUM and leaf.num_active > 1:
                    raise DoubleReductionError(
                        double_reduction_message("strategy.reduce", "")
                    )
                rows, axes = leaf.active, _axes(axis, leaf.active.ndim)
                return (
                    jnp.sum(rows, axes) if op is ReduceOp.SUM else jnp.mean(rows, axes)
                )
            if op is ReduceOp.SUM and self.num_replicas_in_sync > 1:
                if isinstance(leaf, int | float) and leaf == 0:
                    return leaf
                raise ValueError(
                    f"`value` is {leaf!r}, which is not a per-replica value, so "
                    f"ReduceOp.SUM over {self.num_replicas_in_sync} replicas has no "
                    "meaning. Pass what `strategy.run` returned, or use ReduceOp.MEAN."
                )
            if axis is None:
                return leaf
            return jnp.sum(leaf, axis) if op is ReduceOp.SUM else jnp.mean(leaf, axis)

        return self._outside(jax.tree.map(reduce_leaf, value, is_leaf=is_per_replica))

    @hides_frames
    def gather(self, value: PyTree, axis: int) -> PyTree:
        """Joins the values of all replicas along an axis.

        Args:
            value: A pytree of `PerReplica` values.
            axis: The axis of each replica's value to join, such as 0 for examples.

        Returns:
            The same pytree with one array for each `PerReplica`.

        Raises:
            ReplicaContextError: In replica context.
            ValueError: If a value has no such axis.
        """
        require_cross_replica_context(
            "strategy.gather", "use `get_replica_context().all_gather` there"
        )

        def gather_leaf(leaf: Any) -> Any:
            if not is_per_replica(leaf):
                return leaf
            rows, shape = leaf.active, leaf.active.shape[1:]
            if not -len(shape) <= axis < len(shape):
                raise ValueError(
                    f"`axis` is {axis}, but the value of each replica has shape "
                    f"{shape}. Use an axis it has, or `strategy.local_results(value)`."
                )
            at = axis % len(shape)
            joined = (*shape[:at], rows.shape[0] * shape[at], *shape[at + 1 :])
            return jnp.moveaxis(rows, 0, at).reshape(joined)

        return self._outside(jax.tree.map(gather_leaf, value, is_leaf=is_per_replica))

    def local_results(self, value: PyTree) -> tuple[PyTree, ...]:
        """Returns the values of this process's replicas, one entry for each.

        Args:
            value: A pytree of `PerReplica` values; other leaves are in every entry.

        Returns:
            One pytree per replica that holds data.
        """
        leaves, treedef = jax.tree.flatten(value, is_leaf=is_per_replica)
        counts = [leaf.num_active for leaf in leaves if is_per_replica(leaf)]
        rows = [leaf.values if is_per_replica(leaf) else None for leaf in leaves]
        return tuple(
            treedef.unflatten(
                leaf if row is None else row[replica]
                for leaf, row in zip(leaves, rows, strict=True)
            )
            for replica in range(min(counts, default=1))
        )

    def distribute_dataset(
        self, dataset: Any, options: InputOptions | None = None
    ) -> DistributedDataset:
        """Returns a dataset that splits each *global* batch over replicas.

        Args:
            dataset: Anything `armillary.data.as_source` takes.
            options: How to treat remainders, and how far to read ahead.

        Returns:
            A dataset to iterate with `for` or `next`, or to give to a trainer.
        """
        return DistributedDataset(dataset, self.layout, options=options)

    def distribute_datasets_from_function(
        self,
        dataset_fn: Callable[[InputContext], Any],
        options: InputOptions | None = None,
    ) -> DistributedDataset:
        """Returns a dataset that takes each replica's batch from the user's own.

        Args:
            dataset_fn: Called once in each process with its `InputContext`. It
                returns a dataset batched with the *per-replica* batch size, see
                `InputContext.get_per_replica_batch_size`, as in `tf.distribute`.
            options: How to treat remainders, and how far to read ahead.

        Returns:
            A dataset to iterate with `for` or `next`, or to give to a trainer.
        """
        check_callable("dataset_fn", dataset_fn)
        peers = self.peers
        context = InputContext(
            num_input_pipelines=1 if peers is None else peers.count,
            input_pipeline_id=0 if peers is None else peers.index,
            num_replicas_in_sync=self.num_replicas_in_sync,
        )
        return DistributedDataset(
            dataset_fn(context), self.layout, per_replica_batches=True, options=options
        )

    def distribute_values_from_function(
        self, value_fn: Callable[[ValueContext], Any]
    ) -> PyTree:
        """Returns a `PerReplica` made of one call of `value_fn` for each replica.

        Each process calls it for its own replicas.

        Args:
            value_fn: Gets a `ValueContext` and returns that replica's value, a pytree
                of arrays of the same shapes for all replicas.

        Returns:
            The values, placed on the replicas' devices.
        """
        check_callable("value_fn", value_fn)
        layout, count = self.layout, self.num_replicas_in_sync
        values = [
            value_fn(ValueContext(replica, count)) for replica in layout.local_replicas
        ]
        if not layout.stacked:
            return layout.place(values[0])
        stacked = jax.tree.map(lambda *rows: jnp.stack(rows), *values)
        return layout.wrap(layout.place(stacked), count)

    def make_numpy_dataset(self, arrays: PyTree, **options: Any) -> ArrayDataset:
        """Returns a dataset of arrays in memory; see `armillary.data.from_arrays`."""
        return from_arrays(arrays, **options)

    def _outside(self, value: PyTree) -> PyTree:
        """Returns a result that was computed from several devices' values."""
        self.dispatch.finish(value)
        return value

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.num_replicas_in_sync} replicas)"

    # The spellings of the TensorFlow guides.
    experimental_distribute_dataset = distribute_dataset
    experimental_distribute_datasets_from_function = distribute_datasets_from_function
    experimental_distribute_values_from_function = distribute_values_from_function
    experimental_local_results = local_results
    experimental_make_numpy_dataset = make_numpy_dataset


def _axes(axis: int | None, ndim: int) -> tuple[int, ...]:
    if axis is None:
        return (0,)
    if not -(ndim - 1) <= axis < ndim - 1:
        raise ValueError(
            f"`axis` is {axis}, but the value of each replica has {ndim - 1} axes. Use "
            "an axis it has, or `axis=None` to reduce over replicas only."
        )
    return (0, axis + 1 if axis >= 0 else ndim + axis)
