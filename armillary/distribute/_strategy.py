"""The base class of all strategies.

A subclass decides how a step runs (`_run`), and its placement says where state and
batches are. The methods that users call are written here, on top of these two.
"""

import contextlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.sharding import AbstractMesh, Mesh, Sharding

from armillary._checks import check_callable, check_instance
from armillary._copy_refusal import OfOneProcess
from armillary._traceback import hides_frames
from armillary.cluster._peers import Peers
from armillary.cluster.resolvers._resolver import ClusterResolver
from armillary.data._dataset import DistributedDataset, DistributedIterator
from armillary.data._layout import (
    BatchLayout,
    InputContext,
    InputOptions,
    first_replicas,
    hosted_replicas,
)
from armillary.data.sources._arrays import ArrayDataset, from_arrays
from armillary.distribute._birth import make_in_place
from armillary.distribute._dispatch import Dispatch
from armillary.distribute._global_arrays import everywhere
from armillary.distribute._placement import Placement
from armillary.distribute.replica._axis import DEFAULT_AXIS_NAME, explain_unbound_axis
from armillary.distribute.replica._context import (
    Scope,
    get_running_context,
    is_in_default_step,
    lifted_state,
    require_cross_replica_context,
)
from armillary.distribute.replica._cross_device import CrossDeviceOps
from armillary.distribute.replica._extended import StrategyExtended
from armillary.distribute.replica._program_mesh import without_program_mesh
from armillary.distribute.replica._values import (
    PerReplica,
    ReduceOp,
    check_axis,
    concatenate,
    is_per_replica,
)
from armillary.errors import DoubleReductionError, ReplicaContextError
from armillary.state._adapters import follow_strategies
from armillary.state._lift import State
from armillary.typing import PyTree
from armillary.xla._lowerings import Split

T = TypeVar("T")

OPTIONS_FIX = 'Use `armillary.data.InputOptions(remainder="exact")`.'
_REDUCE = {
    ReduceOp.SUM: jnp.sum,
    ReduceOp.MEAN: jnp.mean,
    ReduceOp.MAX: jnp.max,
    ReduceOp.MIN: jnp.min,
}


class ValueContext(NamedTuple):
    """The argument of a function of `distribute_values_from_function`.

    Attributes:
        replica_id_in_sync_group: The replica that gets the value.
        num_replicas_in_sync: The number of replicas.
    """

    replica_id_in_sync_group: int
    num_replicas_in_sync: int


class Strategy(OfOneProcess):
    """Spreads one training step over devices (`tf.distribute.Strategy`).

    Use one of the subclasses. Code written against this class runs under all of them.

    Args:
        placement: The devices, and the place of state and batches on them.
        axis_name: The name of the axis of replicas inside `run`.

    Attributes:
        placement: The devices, and the place of state and batches on them.
        axis_name: The name of the axis of replicas, for the functions of `jax.lax`.
            Inside `run`, this axis exists under every strategy, even with one replica.
    """

    _why_not_copied = "it stands for the devices of this process"
    _copy_instead = (
        "Make the strategy, and the trainers that hold it, in the process that uses "
        "them. To pass on a trained state, save a `Checkpoint`, or copy the state "
        "(`nnx.clone(model)`, or `trainer.state` of a `StepTrainer`)."
    )

    cross_device_ops: CrossDeviceOps | None = None
    """The method of `all_reduce` to combine values; `None` leaves it to XLA."""

    loop_class: Any = None
    """The class of a trainer's loops, if steps do not run on the devices."""

    # Whether this process trains. An evaluator does not share in the workers' data.
    _trains = True

    default_device: Any = None
    """The device of arrays that are made in the scope; `None` for JAX's default."""

    def __init__(
        self, placement: Placement, axis_name: str = DEFAULT_AXIS_NAME
    ) -> None:
        self.placement = placement
        self.axis_name = axis_name
        # The findings in steps that the log has warned of, once each.
        self.warned: set[NamedTuple] = set()
        self.dispatch = Dispatch(placement.mesh)

    @property
    def num_replicas_in_sync(self) -> int:
        """The number of copies of the step that run together.

        They divide a global batch. Inside `run`, it is the number of replicas in this
        call: it is smaller for an uneven batch of a dataset with
        `InputOptions(remainder="exact")`.
        """
        context = get_running_context(self)
        if context is None:
            return self.placement.num_replicas
        return context.num_replicas_in_sync

    @property
    def mesh(self) -> Mesh | None:
        """The mesh of devices; `None` for a strategy on a single device."""
        return self.placement.mesh

    @property
    def platform(self) -> str:
        """The kind of device that steps run on, such as `"cpu"`."""
        return self.placement.platform

    @property
    def layout(self) -> BatchLayout:
        """The placement of the batches of a distributed dataset."""
        return self.placement.layout

    @property
    def peers(self) -> Peers | None:
        """The processes that this strategy spans; `None` for a single process."""
        peers = self.placement.peers
        return None if peers.is_alone else peers

    @property
    def home(self) -> Sharding | None:
        """The place of state between programs; `None` if programs leave it in place."""
        return self.placement.home

    @property
    def split(self) -> Split | None:
        """The division of examples, if XLA divides a step between devices itself."""
        return self.placement.split

    @contextlib.contextmanager
    def described(self, num_devices: int, platform: str) -> Iterator[AbstractMesh]:
        """Makes this strategy trace programs for devices that are not present.

        The context manager gives the mesh of these devices.

        Raises:
            ValueError: If the strategy is for one device or spans several processes.
        """
        present = self.placement
        if present.mesh is None or not present.peers.is_alone:
            where = "one device" if present.mesh is None else "several processes"
            raise ValueError(
                f"The strategy is {self!r}, which is for {where}. Plan with "
                "`armillary.MirroredStrategy()` in one process, for any number of "
                "devices."
            )
        self.placement = present.abstract(num_devices, platform)
        try:
            # The mesh of the devices that are present may be set.
            with self.leave_program_mesh():
                yield self.placement.mesh
        finally:
            self.placement = present

    @property
    def cluster_resolver(self) -> ClusterResolver | None:
        """The resolver that described the cluster; `None` for one process."""
        return None

    @property
    def extended(self) -> StrategyExtended:
        """More calls of `tf.distribute`, such as `update` within a `merge_call`."""
        return StrategyExtended(self)

    @property
    def input_context(self) -> InputContext:
        """The share of the data that this process reads."""
        peers = self.placement.peers
        return InputContext(
            num_input_pipelines=peers.count,
            input_pipeline_id=peers.index,
            num_replicas_in_sync=self.num_replicas_in_sync,
        )

    def _run(
        self, state: State | None, fn: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> PyTree:
        """Runs `fn` once per replica; `state` is the state that a step has lifted."""
        raise NotImplementedError

    def leave_program_mesh(self) -> AbstractContextManager[Any]:
        """Returns a context in which a mesh of the program (`jax.set_mesh`) is not set.

        A strategy computes on its own devices.
        """
        return without_program_mesh()

    def jax_settings(self) -> AbstractContextManager[Any]:
        """Returns a context with the settings of JAX for the code in the scope."""
        if self.default_device is None:
            return contextlib.nullcontext()
        return jax.default_device(self.default_device)

    def scope(self) -> AbstractContextManager["Strategy"]:
        """Returns a context manager that puts this strategy in effect.

        Code inside is in cross-replica context, and `get_strategy()` returns this
        strategy. Variables may be made inside or outside; they are placed on the
        strategy's devices when a step first uses them. A `OneDeviceStrategy` places
        the arrays that are made inside on its device immediately. A `ShardedStrategy`
        sets its mesh, as `jax.set_mesh` does, so they are on all devices.

        Raises:
            ReplicaContextError: If called inside `run`, or inside another strategy's
                scope.
        """
        follow_strategies()
        instead = "enter the scope around `run`"
        require_cross_replica_context("strategy.scope", instead, self)
        return Scope(self, settings=self.jax_settings)

    @hides_frames
    def make(self, fn: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Returns the result of `fn`, with each array made where it belongs.

        The function is traced and then compiled for the shardings of its arrays, so no
        device holds more than its part, also while the function runs. Random numbers
        are the same as on one device::

            def make_model():
                model = Transformer(nnx.Rngs(0))
                return model, nnx.Optimizer(model, optax.adamw(1e-3), wrt=nnx.Param)

            model, optimizer = strategy.make(make_model)

        Arrays that `fn` only reads, such as weights from a file, are copied to every
        device. The first step reuses the memory of the result, so copy an array before
        you keep it (`array.copy()`). All processes of the strategy must call it.

        Args:
            fn: Returns an object with variables, a pytree of arrays, or a nest of both.
                As it is traced, it cannot read the values of the arrays that it makes.
            args: Arguments of `fn`, such as `nnx.Rngs(0)` if `fn` is a class.
            kwargs: Arguments of `fn`.

        Returns:
            The result of `fn`, as if `fn` had been called.

        Raises:
            ReplicaContextError: If called inside `run`, or in another strategy's scope.
            StateStructureError: If `fn` puts an array into a tuple or a function of an
                object, where nothing can replace it.
            TypeError: If `fn` cannot be called.
            ValueError: If an annotation or a rule does not fit an array or the devices.
        """
        check_callable("fn", fn)
        if inspect.isgeneratorfunction(fn) or inspect.iscoroutinefunction(fn):
            raise TypeError(
                f"`fn` is {fn!r}, a generator or a coroutine, which makes nothing when "
                "it is called. Return the model from a function."
            )
        instead = "call it before the step"
        require_cross_replica_context("strategy.make", instead, self)
        return make_in_place(self, fn, args, kwargs)

    @hides_frames
    def run(
        self,
        fn: Callable[..., PyTree],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> PyTree:
        """Runs `fn` once per replica, each with its share of the batch.

        In a trainer, `fn` may read and write every variable that the trainer reaches.
        Outside a trainer and `armillary.function`, it may use every variable that `fn`
        and its arguments reach. Inside `fn`, all values belong to one replica. Values
        are combined only by `armillary.all_reduce`, or by JAX's collectives over the
        axis `"replica"` (or the strategy's `axis_name`).

        Args:
            fn: The function. It runs in replica context.
            args: Positional arguments. `PerReplica` values, such as batches of a
                distributed dataset, are split. Other arrays must be equal in all
                processes, and every replica gets all of them.
            kwargs: Keyword arguments, with the same rules.

        Returns:
            The result of `fn`, with each array as a `PerReplica`. With a single
            replica, the result itself.

        Raises:
            ReplicaContextError: If called inside `run`, or in another strategy's scope.
            ReplicaMismatchError: If `fn` leaves a per-replica value in a mirrored slot.
            DoubleReductionError: If `fn` sums values that were already reduced, takes
                the mean of values that were already divided, or adds up noise that
                replicas share.
            TypeError: If `fn` cannot be called, `args` is not a tuple, or `args` is a
                batch that is a tuple.
        """
        check_callable("fn", fn)
        if not isinstance(args, tuple | list):
            raise TypeError(
                f"`args` is {args!r} of type {type(args).__name__}, but it must be a "
                "tuple. Write `strategy.run(fn, args=(batch,))`, with the comma."
            )
        check_instance("kwargs", kwargs, dict | None, "Write `kwargs={...}`.")
        require_cross_replica_context("strategy.run", "call `fn` directly", self)
        replica = get_running_context(self)
        if replica is not None:  # The code runs in a `merge_call`.
            return replica.run_merged(fn, tuple(args), kwargs or {})
        if self.placement.num_replicas > 1 and is_in_default_step():
            _check_divided(self, (args, kwargs))
        try:
            with self.leave_program_mesh():
                return self._run(lifted_state(), fn, *args, **(kwargs or {}))
        except NameError as error:
            note = explain_unbound_axis(error, self)
            # A program of this call may already have added it.
            if note is not None and note not in getattr(error, "__notes__", ()):
                error.add_note(note)
            raise
        except TypeError:
            _check_is_no_batch(fn, args, kwargs or {})
            raise

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
            return _REDUCE[op](leaf.active, (0, axis if axis < 0 else 1 + axis))

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
            if self.mesh is None or not (is_part and isinstance(whole, Tracer)):
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
        rows = [self._local_parts(x) if is_per_replica(x) else None for x in leaves]
        num_values = min((len(row) for row in rows if row is not None), default=1)
        pairs = list(zip(leaves, rows, strict=True))
        return tuple(
            treedef.unflatten(leaf if row is None else row[i] for leaf, row in pairs)
            for i in range(num_values)
        )

    def _local_parts(self, value: PerReplica) -> list[Any]:
        parts = value.parts()
        layout = self.layout
        if layout.peers.is_alone:
            return list(parts.values())
        count = value.shared_by or len(value.array)
        local = hosted_replicas(layout.local_replicas, layout.num_replicas, count)
        return [part for i, part in parts.items() if i in local]

    def distribute_dataset(
        self, dataset: Any, options: InputOptions | None = None
    ) -> DistributedDataset:
        """Returns a dataset that splits each *global* batch over replicas.

        Each process reads all of the data, and keeps the rows of its own devices. Pass
        the same data, in the same order, to all processes. Sources of `from_arrays` and
        similar functions are compared between processes.

        Args:
            dataset: Anything `armillary.data.as_source` takes.
            options: How to treat remainders, and how far to read ahead.

        Returns:
            A dataset to iterate with `for` or `next`, or to give to a trainer.
        """
        check_instance("options", options, InputOptions | None, OPTIONS_FIX)
        follow_strategies()  # `fit` may read it.
        self._check_dataset(dataset)
        return DistributedDataset(dataset, self.layout, options=options)

    def _check_dataset(self, dataset: Any) -> None:
        """Raises if a dataset for all processes differs between them."""

    def distribute_datasets_from_function(
        self,
        dataset_fn: Callable[[InputContext], Any],
        options: InputOptions | None = None,
    ) -> DistributedDataset:
        """Returns a dataset that takes each replica's batches from a user's function.

        The datasets of several processes may differ in length. Training ends with the
        shortest dataset, and a complete evaluation uses every example of all of them.
        A trainer under a `ParameterServerStrategy` calls `dataset_fn` again on each
        worker.

        Args:
            dataset_fn: Called once in each process with its `InputContext`. As in
                `tf.distribute`, it returns a dataset batched with the *per-replica*
                batch size (see `InputContext.get_per_replica_batch_size`).
            options: How to treat remainders, and how far to read ahead.

        Returns:
            A dataset to iterate with `for` or `next`, or to give to a trainer.

        Raises:
            ValueError: Under a `ShardedStrategy` over several processes.
        """
        check_callable("dataset_fn", dataset_fn)
        check_instance("options", options, InputOptions | None, OPTIONS_FIX)
        if not (self.layout.peers.is_alone or self.layout.stacked):
            raise ValueError(
                "`distribute_datasets_from_function` (a function with an "
                "`input_context`) lets each process read data of its own, but under "
                f"{self!r} all processes share each batch. Use "
                "`strategy.distribute_dataset(dataset)`, with the same data in each "
                "process."
            )
        dataset = DistributedDataset(
            dataset_fn(self.input_context),
            self.layout,
            per_replica_batches=True,
            options=options,
        )
        dataset.dataset_fn = dataset_fn
        dataset.ignores_state = not self._trains
        return dataset

    def distribute_values_from_function(
        self, value_fn: Callable[[ValueContext], Any]
    ) -> PyTree:
        """Returns a `PerReplica` with the result of `value_fn` for each replica.

        Each process calls `value_fn` for its own replicas.

        Args:
            value_fn: Gets a `ValueContext` and returns that replica's value, a pytree
                of arrays of the same shapes for all replicas.

        Returns:
            The values, on the replicas' devices. On one replica, its value itself.
        """
        check_callable("value_fn", value_fn)
        layout = self.layout
        count = self.num_replicas_in_sync
        values = [
            value_fn(ValueContext(replica, count)) for replica in layout.local_replicas
        ]
        if not layout.stacked:
            return layout.place(values[0])
        if count == 1:
            return layout.replicate(values[0])
        stacked = jax.tree.map(lambda *rows: jnp.stack(rows), *values)
        return layout.wrap(layout.place(stacked), first_replicas(count))

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

    def __repr__(self) -> str:
        count = self.num_replicas_in_sync
        return f"{type(self).__name__}({count} replica{'' if count == 1 else 's'})"

    @hides_frames
    def make_numpy_dataset(
        self,
        arrays: PyTree,
        *,
        batch_size: int,
        shuffle_seed: int | None = None,
        repeat: bool = False,
        drop_remainder: bool = False,
    ) -> ArrayDataset:
        """Returns a dataset of the rows of `arrays`; see `armillary.data.from_arrays`.

        To spread its batches over the replicas, give it to `distribute_dataset`. A
        dataset here has batches, so the batch size is an argument, where a program for
        TensorFlow calls `dataset.batch`.

        Args:
            arrays: As in `from_arrays`.
            batch_size: Examples in one batch of all replicas together.
            shuffle_seed: As in `from_arrays`.
            repeat: As in `from_arrays`.
            drop_remainder: As in `from_arrays`.

        Returns:
            The dataset.
        """
        return from_arrays(
            arrays,
            batch_size=batch_size,
            shuffle_seed=shuffle_seed,
            repeat=repeat,
            drop_remainder=drop_remainder,
        )

    @hides_frames
    def experimental_run(
        self, fn: Callable[..., PyTree], input_iterator: Iterator[Any] | None = None
    ) -> PyTree:
        """Runs `fn` once per replica, with the next batch of an iterator.

        It is `run(fn, args=(next(input_iterator),))`, for programs written for
        TensorFlow 1.

        Args:
            fn: The function. It runs in replica context.
            input_iterator: An iterator over a distributed dataset. `None` calls `fn`
                without an argument.

        Returns:
            As `run`.

        Raises:
            TypeError: If `input_iterator` is not an iterator, but a dataset.
            StopIteration: If the data has ended.
        """
        if input_iterator is None:
            return self.run(fn)
        if not hasattr(input_iterator, "__next__"):
            raise TypeError(
                f"`input_iterator` is of type {type(input_iterator).__name__}, but it "
                "must be an iterator. Write `strategy.experimental_run(fn, "
                "iter(dataset))`, and make the iterator before the loop."
            )
        return self.run(fn, args=(next(input_iterator),))

    def make_dataset_iterator(self, dataset: Any) -> DistributedIterator:
        """Returns an iterator that splits each *global* batch over replicas.

        It is `iter(strategy.distribute_dataset(dataset))`, for programs written for
        TensorFlow 1. Its `initialize` begins the next pass over the data.

        Args:
            dataset: Anything `armillary.data.as_source` takes.

        Returns:
            An iterator for `next`, for `experimental_run`, or for a `for` loop.
        """
        return iter(self.distribute_dataset(dataset))

    def make_input_fn_iterator(
        self, input_fn: Callable[[InputContext], Any]
    ) -> DistributedIterator:
        """Returns an iterator over the dataset that a function returns.

        It is `iter(strategy.distribute_datasets_from_function(input_fn))`, for programs
        written for TensorFlow 1.

        Args:
            input_fn: As `dataset_fn` of `distribute_datasets_from_function`.

        Returns:
            An iterator for `next`, for `experimental_run`, or for a `for` loop.
        """
        return iter(self.distribute_datasets_from_function(input_fn))

    # Other spellings of these methods in TensorFlow's guides.
    experimental_distribute_dataset = distribute_dataset
    experimental_distribute_datasets_from_function = distribute_datasets_from_function
    experimental_distribute_values_from_function = distribute_values_from_function
    experimental_local_results = local_results
    experimental_make_numpy_dataset = make_numpy_dataset
    experimental_run_v2 = run
    make_experimental_numpy_dataset = make_numpy_dataset
    unwrap = local_results

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Makes the other spellings of a method follow an override in a subclass."""
        super().__init_subclass__(**kwargs)
        for spelling, method in vars(Strategy).items():
            name = getattr(method, "__name__", spelling)
            if name != spelling and name in vars(cls):
                setattr(cls, spelling, vars(cls)[name])


def _check_divided(strategy: Strategy, arguments: PyTree) -> None:
    """Raises if `run` gets a whole batch in a step that runs under no strategy."""
    leaves = jax.tree.leaves(arguments, is_leaf=is_per_replica)
    has_arrays = any(isinstance(leaf, jax.Array) for leaf in leaves)
    if has_arrays and not any(map(is_per_replica, leaves)):
        raise ReplicaContextError(
            f"`run` of {strategy!r} was called in a step that runs under no strategy, "
            "so each replica would get the whole batch. Assign the strategy to an "
            "attribute of the trainer (`self.strategy = strategy`), or use "
            "`strategy.scope()`."
        )


def _check_is_no_batch(
    fn: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]
) -> None:
    """Raises if `args` is a batch that is a tuple, instead of a tuple with the batch.

    It is called only after an error, because reading a signature takes long.
    """
    if len(args) > 1 and _fits(fn, [args], kwargs) and not _fits(fn, args, kwargs):
        name = getattr(fn, "__name__", "fn")
        raise TypeError(
            f"`args` is a tuple of {len(args)} values, so `{name}` gets "
            f"{len(args)} arguments, but it takes one. To give it a batch that is a "
            "tuple, write `strategy.run(fn, args=(batch,))`, with the comma."
        ) from None


def _fits(fn: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    try:
        inspect.signature(fn).bind(*args, **kwargs)
    except (TypeError, ValueError):  # A `ValueError` if `fn` has no signature.
        return False
    return True
