"""Strategies on the devices of one process, and `make_distributed_dataset`."""

import functools
import inspect
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, Self

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from armillary._checks import check_instance
from armillary.cluster._peers import ALONE, Peers
from armillary.cluster.resolvers._resolver import check_is_no_server
from armillary.data._dataset import DistributedDataset
from armillary.data._layout import InputContext, InputOptions
from armillary.distribute._data_methods import OPTIONS_FIX
from armillary.distribute._global_arrays import make_auto_mesh
from armillary.distribute._strategy import Strategy
from armillary.distribute.program._function import FunctionCache
from armillary.distribute.replica._axis import DEFAULT_AXIS_NAME, check_axis_name
from armillary.distribute.replica._context import get_strategy, set_default
from armillary.distribute.replica._cross_device import CrossDeviceOps
from armillary.distribute.replica._policy import check_annotations
from armillary.distribute.replica._replica import ReplicaContext
from armillary.distribute.replica._run import run_in_replicas
from armillary.distribute.replica._run_alone import run_alone
from armillary.distribute.strategies._layouts import Device, as_device, as_devices
from armillary.distribute.strategies._placements import (
    DevicePlacement,
    ReplicaPlacement,
)
from armillary.state._lift import State
from armillary.typing import PyTree


class SingleStrategy(Strategy):
    """One replica, on a device; `None` is JAX's default device."""

    def __init__(
        self, device: Device | None = None, axis_name: str = DEFAULT_AXIS_NAME
    ) -> None:
        super().__init__(DevicePlacement.on(device), axis_name)
        self.default_device = device

    def _run(
        self, state: State | None, fn: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> PyTree:
        if state is not None:
            check_annotations(state)
        device = self.default_device
        place = nullcontext if device is None else jax.default_device
        with place(device):
            return run_alone(self, fn, args, kwargs, state)


class DefaultStrategy(SingleStrategy):
    """The strategy that is in effect if the program has chosen no other strategy.

    There is one instance. Under it, `run` calls the function as the only replica, and
    state and batches stay on JAX's default device.
    """

    _instance: "DefaultStrategy | None" = None

    def __new__(cls) -> Self:
        """Returns the one instance."""
        if cls._instance is None:
            cls._instance = super().__new__(cls)
        return cls._instance  # pyright: ignore[reportReturnType]

    def __init__(self) -> None:
        super().__init__()

    def leave_program_mesh(self) -> AbstractContextManager[Any]:
        """Changes nothing: a step runs in the mesh of the program."""
        return nullcontext()

    def scope(self) -> AbstractContextManager[Strategy]:
        """Changes nothing, because this strategy is in effect by default.

        Raises:
            ReplicaContextError: Inside `run`, or inside another strategy's scope.
        """
        super().scope()
        return nullcontext(self)


class OneDeviceStrategy(SingleStrategy):
    """Runs every step on one device (`tf.distribute.OneDeviceStrategy`).

    Variables and arrays that are made in its `scope` are on that device from the
    beginning. So are the batches of its datasets.

    Args:
        device: A `jax.Device`, or a name such as `"cpu:0"` or `"gpu:1"`.
        axis_name: As for `MirroredStrategy`. The axis has length 1 here.

    Raises:
        ClusterError: If `TF_CONFIG` says that this process is a `ps`.
        TypeError: If `axis_name` is not a string.
        ValueError: If there is no such device, or `axis_name` is empty.
    """

    def __init__(self, device: Any, *, axis_name: str = DEFAULT_AXIS_NAME) -> None:
        check_axis_name(axis_name)
        check_is_no_server(self.cluster_resolver)
        super().__init__(as_device("device", device), axis_name)

    def __repr__(self) -> str:
        return f"OneDeviceStrategy({self.default_device})"


_default = DefaultStrategy()
set_default(ReplicaContext(_default, None, active=(0,)))


class MirroredStrategy(Strategy):
    """One replica per device, with equal variables on all of them.

    As `tf.distribute.MirroredStrategy`: each replica computes gradients on its share of
    the batch, the step reduces them (`armillary.all_reduce`), and every replica makes
    the same update.

    Args:
        devices: One `jax.Device` or name (`"gpu:0"`) per replica. By default all
            devices of this process.
        cross_device_ops: The method of `all_reduce` to combine values over replicas,
            such as `armillary.distribute.HierarchicalCopyAllReduce()` or your own
            `CrossDeviceOps`. By default, XLA chooses.
        axis_name: The name of the axis of replicas inside `run`. Change it for a model
            that uses a different name, such as `BatchNorm(axis_name="batch")`.

    Raises:
        ClusterError: If `TF_CONFIG` says that this process is a `ps`.
        TypeError: If `cross_device_ops` or `axis_name` is of the wrong type.
        ValueError: If the devices cannot form replicas, or cannot form the groups of
            `cross_device_ops`, or if `axis_name` is empty.
    """

    # The processes that a subclass has joined.
    _peers: Peers = ALONE

    def __init__(
        self,
        devices: Sequence[Any] | None = None,
        cross_device_ops: CrossDeviceOps | None = None,
        *,
        axis_name: str = DEFAULT_AXIS_NAME,
    ) -> None:
        check_axis_name(axis_name)
        check_is_no_server(self.cluster_resolver)
        found = as_devices("devices", devices)
        fix = "Use `armillary.distribute.NcclAllReduce()`, or leave it out."
        kind = CrossDeviceOps | None
        check_instance("cross_device_ops", cross_device_ops, kind, fix)
        if cross_device_ops is not None:
            cross_device_ops._check_replicas(len(found))
        self.cross_device_ops = cross_device_ops
        mesh = make_auto_mesh(np.asarray(found), [axis_name])
        super().__init__(ReplicaPlacement.on(mesh, self._peers), axis_name)
        self._functions = FunctionCache()

    def _run(
        self, state: State | None, fn: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> PyTree:
        if state is not None:
            return run_in_replicas(self, self.placement.mesh, fn, args, kwargs, state)
        return self._functions.get(fn, self)(*args, **kwargs)

    def _show(self, where: str = "") -> str:
        replicas = f"{self.num_replicas_in_sync} x {self.platform}"
        return f"{type(self).__name__}({replicas}{where})"

    def __repr__(self) -> str:
        return self._show()


class CentralStorageStrategy(MirroredStrategy):
    """One replica per device, with the variables in one place.

    As `tf.distribute.experimental.CentralStorageStrategy`: variables are stored in the
    memory of `parameter_device`, by default the memory of the host. A compiled program
    first copies the variables that it reads to the devices. At its end, it copies
    changed variables back. So between programs the devices hold no state. While a
    program runs, each device holds a copy, as under `MirroredStrategy`, and all devices
    make the same aggregated update.
    A program is a call of an `armillary.function` or of `run`, or a chunk of steps of a
    trainer: `StandardTrainerOptions(steps_per_chunk=1)` moves state at every step.

    Args:
        compute_devices: One `jax.Device` or name (`"gpu:0"`) per replica. By default
            all devices of this process.
        parameter_device: The device that stores the variables, or its name. By default
            the first CPU, that is, the memory of the host. A name reaches platforms
            other than JAX's default platform. This is also an attribute.
        axis_name: As for `MirroredStrategy`.

    Raises:
        ClusterError: If `TF_CONFIG` says that this process is a `ps`.
        TypeError: If `axis_name` is not a string.
        ValueError: If a device does not exist, the devices cannot form replicas, or
            `axis_name` is empty.
    """

    def __init__(
        self,
        compute_devices: Sequence[Any] | None = None,
        parameter_device: Any = None,
        *,
        axis_name: str = DEFAULT_AXIS_NAME,
    ) -> None:
        check_axis_name(axis_name)
        devices = as_devices("compute_devices", compute_devices)
        super().__init__(devices, axis_name=axis_name)
        home = "cpu:0" if parameter_device is None else parameter_device
        self.parameter_device: Device = as_device("parameter_device", home)
        sharding = SingleDeviceSharding(self.parameter_device)
        self.placement = replace(self.placement, home=sharding)

    def __repr__(self) -> str:
        home = f"{self.parameter_device.platform}:{self.parameter_device.id}"
        return self._show(f", state on {home}")


def make_distributed_dataset(
    strategy: Strategy | None,
    dataset_or_fn: Any,
    *args: Any,
    input_options: InputOptions | None = None,
    **kwargs: Any,
) -> DistributedDataset:
    """Distributes a dataset, or a function's dataset, over a strategy's replicas.

    It replaces `orbit.utils.make_distributed_dataset`, and has three forms::

        make_distributed_dataset(strategy, dataset)                 # global batches
        make_distributed_dataset(strategy, make_data, batch_size=256)   # the same
        make_distributed_dataset(strategy, make_shard, batch_size=256)  # per replica

    The last function takes an `input_context`, which describes its share of the data.
    It returns batches of the *per-replica* size
    (`input_context.get_per_replica_batch_size(batch_size)`). In Orbit, the batches of
    every function have the per-replica size. Here, a function without an
    `input_context` returns global batches.

    Args:
        strategy: The strategy, or `None` for the one in effect (`get_strategy()`).
        dataset_or_fn: Anything `armillary.data.as_source` takes, batched with the
            global batch size; or a function that returns such a dataset.
        *args: Positional arguments for the function.
        input_options: How to treat remainders, and how far to read ahead.
        **kwargs: Keyword arguments for the function.

    Returns:
        A dataset to iterate, or to give to a trainer or an evaluator.

    Raises:
        TypeError: If arguments are given without a function to pass them to, or do not
            fit the function.
    """
    fix = "Use a strategy such as `armillary.MirroredStrategy()`."
    check_instance("strategy", strategy, Strategy | None, fix)
    check_instance("input_options", input_options, InputOptions | None, OPTIONS_FIX)
    if strategy is None:
        strategy = get_strategy()

    # Some datasets can be called, too.
    is_dataset = not callable(dataset_or_fn) or hasattr(dataset_or_fn, "__iter__")
    if is_dataset:
        if args or kwargs:
            given = [*map(repr, args), *kwargs]
            raise TypeError(
                f"`make_distributed_dataset` got {', '.join(given)} for a function, "
                f"but `dataset_or_fn` is a {type(dataset_or_fn).__name__}. Pass a "
                "function that makes the dataset, or leave the arguments out."
            )
        return strategy.distribute_dataset(dataset_or_fn, input_options)

    if "input_context" in inspect.signature(dataset_or_fn).parameters:

        def make_shard(context: InputContext) -> Any:
            return dataset_or_fn(*args, input_context=context, **kwargs)

        return strategy.distribute_datasets_from_function(make_shard, input_options)

    made = dataset_or_fn(*args, **kwargs)
    if inspect.isgenerator(made):
        # Keep the function, because a generator cannot begin again.
        made = functools.partial(dataset_or_fn, *args, **kwargs)
    return strategy.distribute_dataset(made, input_options)
