"""The base of all strategies: how a step spreads over devices.

A strategy decides three things: where a step runs (`_run`), where state lives
(`state_shardings`), and where batches go (`layout`). Everything that users call is
written here once, on top of these.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from numbers import Integral
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec, Sharding

from armillary._checks import check_callable, check_instance
from armillary._traceback import hides_frames
from armillary.cluster._peers import Peers
from armillary.cluster.resolvers._resolver import ClusterResolver
from armillary.data._dataset import DistributedDataset
from armillary.data._layout import (
    BatchLayout,
    InputContext,
    InputOptions,
    hosted_replicas,
)
from armillary.data.sources._arrays import ArrayDataset, from_arrays
from armillary.distribute._dispatch import Dispatch
from armillary.distribute._global_arrays import is_array
from armillary.distribute._keras_fit import follow_keras
from armillary.distribute.replica._collectives import is_argument
from armillary.distribute.replica._context import (
    Scope,
    get_running_context,
    is_in_default_step,
    lifted_state,
    merging_replica,
    require_cross_replica_context,
)
from armillary.distribute.replica._reductions import CrossDeviceOps
from armillary.distribute.replica._values import (
    ReduceOp,
    is_inside,
    is_per_replica,
    other_count,
)
from armillary.errors import DoubleReductionError, ReplicaContextError
from armillary.state._lift import State
from armillary.typing import PyTree
from armillary.xla._lowerings import Split


class ValueContext(NamedTuple):
    """What `distribute_values_from_function` passes to its function.

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

    cross_device_ops: CrossDeviceOps | None = None
    """How steps sum over replicas; `None` leaves it to XLA."""

    reduce_dtype: Any = None
    """What floats travel in between replicas, unless a step says; `None` for theirs."""

    has_copies = True
    """Whether each device of the mesh keeps state of its own between programs."""

    # What devices are, inside `described`.
    _described_platform: str | None = None

    split: Split | None = None
    """How XLA divides examples, where it divides a step between devices itself."""

    def __init__(self, mesh: Mesh | None, num_replicas: int) -> None:
        self._mesh = mesh
        self._num_replicas = num_replicas
        self.dispatch = Dispatch(mesh)
        follow_keras()

    @property
    def num_replicas_in_sync(self) -> int:
        """How many copies of the step run together; divides a global batch.

        Inside `run` it is how many run this call: fewer for an uneven batch of a
        dataset with `InputOptions(remainder="exact")`.
        """
        context = get_running_context(self)
        return self._num_replicas if context is None else context.num_replicas_in_sync

    @property
    def mesh(self) -> Mesh | None:
        """The mesh of devices; `None` for a strategy on a single device."""
        return self._mesh

    @property
    def platform(self) -> str:
        """The kind of device that steps run on, such as `"cpu"`."""
        if self._described_platform is not None:
            return self._described_platform
        if self._mesh is None:
            return jax.default_backend()
        return self._mesh.devices.flat[0].platform  # The same for all of them.

    def described(
        self, num_devices: int, platform: str
    ) -> AbstractContextManager[AbstractMesh]:
        """Lets this strategy trace programs for devices that are not there.

        Inside, it has that many devices, of which nothing but the number is known, and
        it can trace steps but not run them. The context manager gives their mesh.

        Args:
            num_devices: How many there are.
            platform: What kind they are, such as `"tpu"`.

        Raises:
            ValueError: If the strategy is for one device.
        """
        del num_devices, platform
        raise ValueError(
            f"The strategy is {self!r}, which runs on one device, so there is nothing "
            "to plan for several. Train under `armillary.MirroredStrategy()`: on one "
            "device it is the same, and it can be planned for any number."
        )

    @property
    def cluster_resolver(self) -> ClusterResolver | None:
        """The resolver that described the cluster; `None` for one process."""
        return None

    @property
    def input_context(self) -> InputContext:
        """Which share of the data this process reads."""
        peers = self.peers
        return InputContext(
            num_input_pipelines=1 if peers is None else peers.count,
            input_pipeline_id=0 if peers is None else peers.index,
            num_replicas_in_sync=self.num_replicas_in_sync,
        )

    @property
    def layout(self) -> BatchLayout:
        """Where the batches of a distributed dataset go."""
        raise NotImplementedError

    def state_shardings(self, state: State) -> Sequence[Sharding | None]:
        """Returns where each array lives between steps; `None` leaves it where it is.

        Args:
            state: The arrays of a program.
        """
        raise NotImplementedError

    def program_shardings(self, state: State) -> Sequence[Sharding | None]:
        """Returns where each array is while a program runs: by default at home."""
        return self.state_shardings(state)

    def admit(self, arrays: list[Any]) -> list[Any]:
        """Returns a program's arguments where it can take them: by default as is."""
        return arrays

    def bring(self, arguments: PyTree) -> list[Any] | None:
        """Returns the arrays of arguments, with those on other devices moved here.

        `None` if there are none that this process can move.

        Raises:
            ValueError: If one holds a value for each of another number of replicas.
        """
        devices, is_moved = set(self.layout.devices), False

        def move(leaf: Any) -> Any:
            nonlocal is_moved
            array = leaf.array if is_per_replica(leaf) else leaf
            is_concrete = isinstance(array, jax.Array) and not isinstance(array, Tracer)
            if not is_concrete or array.sharding.device_set == devices:
                return array
            is_moved = True
            if is_per_replica(leaf) and not leaf.is_shared:
                if len(array) != self._num_replicas:
                    raise other_count(leaf, self)
                return self.layout.place(array)
            return self.layout.replicate(array)

        if self.peers is not None:
            return None
        leaves = jax.tree.leaves(arguments, is_leaf=is_argument)
        arrays = [array for array in map(move, leaves) if is_array(array)]
        return arrays if is_moved else None

    def fit_scope(
        self, model: Any, arguments: dict[str, Any]
    ) -> AbstractContextManager[None]:
        """Returns what is entered while `model.fit` of Keras runs: by default nothing.

        Args:
            model: The model.
            arguments: Those of `fit`, by name.
        """
        del model, arguments
        return nullcontext()

    def make_train_function(self, model: Any) -> Any:
        """Returns what takes training steps of a Keras model; `None` for Keras' own."""
        del model

    def _run(
        self, state: State | None, fn: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> PyTree:
        """Runs `fn` once per replica; `state` is what an enclosing step has lifted."""
        raise NotImplementedError

    def scope(self) -> AbstractContextManager["Strategy"]:
        """Puts this strategy in effect: a context manager.

        Code under it is in cross-replica context, and `get_strategy()` returns this
        strategy. Variables may be made inside or outside; they are placed on the
        strategy's devices when a step first uses them. It may be entered more than
        once.

        Raises:
            ReplicaContextError: If entered inside `run`, or inside another strategy's
                scope.
        """
        follow_keras()
        return Scope(self)

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
        reach. Inside, code means what it says on one device: all values are the
        replica's own, and nothing is reduced but by `armillary.all_reduce` or JAX's
        collectives over the axis `"replica"`.

        Args:
            fn: The function. It runs in replica context.
            args: Positional arguments. `PerReplica` values, such as batches of a
                distributed dataset, are split; other arrays must be the same
                everywhere, also in each process.
            kwargs: Keyword arguments, likewise.

        Returns:
            What `fn` returned, each array as a `PerReplica`; as it is, if there is a
            single replica.

        Raises:
            ReplicaContextError: If called inside `run`, or in another strategy's scope.
            ReplicaMismatchError: If `fn` leaves a per-replica value in a mirrored slot.
            DoubleReductionError: If `fn` sums what was reduced before, or takes the
                mean of what was divided before.
            TypeError: If `fn` cannot be called, or `args` is no tuple.
        """
        check_callable("fn", fn)
        if not isinstance(args, tuple | list):
            raise TypeError(
                f"`args` is {args!r} of type {type(args).__name__}, but it must be a "
                "tuple of arguments. Write `strategy.run(fn, args=(batch,))`, with the "
                "comma."
            )
        if kwargs is not None:
            check_instance("kwargs", kwargs, dict, "Write `kwargs={...}`.")
        require_cross_replica_context("strategy.run", "call `fn` directly", self)
        replica = merging_replica()
        if replica is not None:
            return replica.run_merged(fn, tuple(args), kwargs or {})
        if self._num_replicas > 1 and is_in_default_step():
            _check_divided(self, (args, kwargs))
        return self._run(lifted_state(), fn, *args, **(kwargs or {}))

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
                examples. The mean is then that of all examples.

        Returns:
            The same pytree with one array for each `PerReplica`.

        Raises:
            PeerError: If a value that replicas share differs between processes.
            ReplicaContextError: In replica context, or in another strategy's scope.
            TypeError: If `axis` is no integer.
            DoubleReductionError: If SUM is asked of values that `run` returned equal on
                all replicas, such as gradients.
            ValueError: If a leaf is not a `PerReplica` and `reduce_op` is SUM, where a
                sum over several replicas would mean nothing; or if it is the array
                inside one.
        """
        require_cross_replica_context(
            "strategy.reduce", "use `get_replica_context().all_reduce` there", self
        )
        if axis is not None:
            _check_axis(axis)
        op, value = ReduceOp.of(reduce_op), self._collect(value)

        def reduce_leaf(leaf: Any) -> Any:
            if is_per_replica(leaf):
                if leaf.is_shared and op is ReduceOp.SUM and leaf.num_active > 1:
                    raise DoubleReductionError(_EQUAL_MESSAGE.format(leaf.num_active))
                return _REDUCE[op](leaf.active, _axes(axis, leaf.active.ndim))
            self._check_whole("strategy.reduce", leaf)
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
            return _REDUCE[op](leaf, axis)

        return self._outside(jax.tree.map(reduce_leaf, value, is_leaf=is_per_replica))

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
            TypeError: If `axis` is no integer.
            ValueError: If a value has no such axis, or is the array inside a
                `PerReplica`.
        """
        require_cross_replica_context(
            "strategy.gather", "use `get_replica_context().all_gather` there", self
        )
        _check_axis(axis)
        value = self._collect(value)

        def gather_leaf(leaf: Any) -> Any:
            if not is_per_replica(leaf):
                self._check_whole("strategy.gather", leaf)
                return leaf
            rows, shape = leaf.active, leaf.active.shape[1:]
            if not -len(shape) <= axis < len(shape):
                raise ValueError(
                    f"`axis` is {axis}, but the value of each replica has shape "
                    f"{shape}. Use an axis it has, or `strategy.local_results(value)`."
                )
            at = axis % len(shape)
            joined = (*shape[:at], rows.shape[0] * shape[at], *shape[at + 1 :])
            whole = jnp.moveaxis(rows, 0, at).reshape(joined)
            is_part = leaf.num_active < leaf.stacked.shape[0]
            if self._mesh is None or not (is_part and isinstance(whole, Tracer)):
                return whole
            # XLA may divide a few rows in a way that JAX 0.9 has no sharding for.
            everywhere = NamedSharding(self._mesh, PartitionSpec())
            return jax.lax.with_sharding_constraint(whole, everywhere)

        return self._outside(jax.tree.map(gather_leaf, value, is_leaf=is_per_replica))

    def local_results(self, value: PyTree) -> tuple[PyTree, ...]:
        """Returns the values of this process's replicas, one entry for each.

        Each replica's part of a `PerReplica` lies on that replica's device. To compute
        with several of them, use `reduce` or `gather`, or fetch them
        (`jax.device_get`).

        Args:
            value: A pytree of `PerReplica` values; other leaves are in every entry.

        Returns:
            One pytree for each replica of this process that holds data.

        Raises:
            ValueError: If a leaf is the array inside a `PerReplica`.
        """
        leaves, treedef = jax.tree.flatten(value, is_leaf=is_per_replica)
        rows = [self._local_parts(leaf) for leaf in leaves]
        counts = [len(row) for row in rows if row is not None]
        return tuple(
            treedef.unflatten(
                leaf if row is None else row[replica]
                for leaf, row in zip(leaves, rows, strict=True)
            )
            for replica in range(min(counts, default=1))
        )

    def _local_parts(self, leaf: Any) -> list[Any] | None:
        if not is_per_replica(leaf):
            self._check_whole("strategy.local_results", leaf)
            return None
        parts, peers = leaf.parts(), self.peers
        if peers is None:
            return list(parts.values())
        count = leaf.shared_by or len(leaf.array)
        own = self.layout.local_replicas
        local = hosted_replicas(own, self._num_replicas, count)
        return [part for replica, part in parts.items() if replica in local]

    def _check_whole(self, function: str, leaf: Any) -> None:
        """Raises if a leaf is a part of a value, or stands for one elsewhere.

        Raises:
            ValueError: If so.
        """
        if is_inside(leaf):
            raise ValueError(
                f"`{function}` was given the array inside a `PerReplica`, which "
                "`jax.tree.map` takes apart. It takes a whole nest: write "
                f"`{function}(..., nest)`, or add `is_leaf=armillary.distribute."
                "is_per_replica` to `jax.tree.map`."
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
        _check_options(options)
        follow_keras()  # `fit` may read it.
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
        _check_options(options)
        return DistributedDataset(
            dataset_fn(self.input_context),
            self.layout,
            per_replica_batches=True,
            options=options,
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
            The values, placed on the replicas' devices. On one replica, its value
            itself, as from `run`.
        """
        check_callable("value_fn", value_fn)
        layout, count = self.layout, self.num_replicas_in_sync
        values = [
            value_fn(ValueContext(replica, count)) for replica in layout.local_replicas
        ]
        if not layout.stacked:
            return layout.place(values[0])
        if count == 1:
            return layout.replicate(values[0])
        stacked = jax.tree.map(lambda *rows: jnp.stack(rows), *values)
        return layout.wrap(layout.place(stacked), count)

    def make_numpy_dataset(self, arrays: PyTree, **options: Any) -> ArrayDataset:
        """Returns a dataset of arrays in memory; see `armillary.data.from_arrays`."""
        return from_arrays(arrays, **options)

    def _collect(self, value: PyTree) -> PyTree:
        """Returns values of all processes as arrays of this one: by default as is."""
        return value

    def _outside(self, value: PyTree) -> PyTree:
        """Returns a result that was computed from several devices' values."""
        self.dispatch.finish(value)
        return value

    def __repr__(self) -> str:
        count = self.num_replicas_in_sync
        return f"{type(self).__name__}({count} replica{'' if count == 1 else 's'})"

    # The spellings of TensorFlow's guides, of several of its versions.
    experimental_run_v2 = run
    unwrap = local_results
    experimental_distribute_dataset = distribute_dataset
    experimental_distribute_datasets_from_function = distribute_datasets_from_function
    experimental_distribute_values_from_function = distribute_values_from_function
    experimental_local_results = local_results
    experimental_make_numpy_dataset = make_numpy_dataset

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        # A method that a subclass overrides is overridden under all its names.
        for alias, method in vars(Strategy).items():
            name = getattr(method, "__name__", alias)
            if name != alias and name in vars(cls):
                setattr(cls, alias, vars(cls)[name])

    if not TYPE_CHECKING:  # which knows which names there are

        def __getattr__(self, name: str) -> Any:
            problem = f"{type(self).__name__!r} object has no attribute {name!r}"
            if name not in _OLD_NAMES:
                raise AttributeError(problem)
            # No guess of Python's is better than this.
            raise AttributeError(f"{problem}. {_OLD_NAMES[name]}", name=name, obj=None)


_PLACED = "Leave it out: XLA places operations, and variables live with the strategy."
_OLD_NAMES = {
    "experimental_run": "Write `strategy.run(fn, args=(next(iterator),))`.",
    "make_dataset_iterator": "Write `iter(strategy.distribute_dataset(dataset))`, and "
    "call it again to begin anew.",
    "make_input_fn_iterator": "Write `iter(strategy.distribute_datasets_from_function("
    "input_fn))`, and call it again to begin anew.",
    "extended": "Use `armillary.all_reduce` in a step, or `merge_call` of "
    "`armillary.get_replica_context()`.",
    "group": "Leave it out: what `strategy.run` does is done without a session.",
    "colocate_vars_with": _PLACED,
    "configure": _PLACED,
    "update_config_proto": _PLACED,
}
_REDUCE = {
    ReduceOp.SUM: jnp.sum,
    ReduceOp.MEAN: jnp.mean,
    ReduceOp.MAX: jnp.max,
    ReduceOp.MIN: jnp.min,
}
_EQUAL_MESSAGE = (
    "`strategy.reduce` was asked for the sum of a value that is equal on all {} "
    "replicas: it was reduced in the step, or no argument of `strategy.run` is a batch "
    "of a distributed dataset. Use the value as it is (ReduceOp.MEAN), or pass batches "
    "of `strategy.distribute_dataset(...)`, of which each replica gets its share."
)


def _check_divided(strategy: Strategy, arguments: PyTree) -> None:
    """Raises if arguments of `run`, in a step under no strategy, are a whole batch.

    Raises:
        ReplicaContextError: If there are arrays, and none is a per-replica value.
    """
    leaves = jax.tree.leaves(arguments, is_leaf=is_per_replica)
    has_arrays = any(isinstance(leaf, jax.Array) for leaf in leaves)
    if has_arrays and not any(map(is_per_replica, leaves)):
        raise ReplicaContextError(
            f"`run` of {strategy!r} was called in a step that runs under no strategy, "
            "so each replica would get the whole batch. Pass `strategy=strategy` "
            "to the `Controller`, assign it to an attribute of the trainer "
            "(`self.strategy = strategy`), or call the step in `strategy.scope()`."
        )


def _check_options(options: Any) -> None:
    fix = 'Use `armillary.InputOptions(remainder="exact")`.'
    check_instance("options", options, InputOptions | None, fix)


def _check_axis(axis: Any) -> None:
    if isinstance(axis, bool) or not isinstance(axis, Integral):
        raise TypeError(
            f"`axis` is {axis!r} of type {type(axis).__name__}, but it must be an "
            "integer. Use `axis=0` for examples."
        )


def _axes(axis: int | None, ndim: int) -> tuple[int, ...]:
    if axis is None:
        return (0,)
    if not -(ndim - 1) <= axis < ndim - 1:
        raise ValueError(
            f"`axis` is {axis}, but the value of each replica has {ndim - 1} axes. Use "
            "an axis it has, or `axis=None` to reduce over replicas only."
        )
    return (0, axis + 1 if axis >= 0 else ndim + axis)
