"""Parameters and optimizer state split over devices, by the compiler."""

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import (
    AbstractMesh,
    AxisType,
    Mesh,
    NamedSharding,
    PartitionSpec,
    Sharding,
)

from armillary._checks import check_instance, check_positive_int
from armillary.cluster._join import CommunicationOptions
from armillary.cluster.resolvers._resolver import ClusterResolver
from armillary.data._dataset import DistributedDataset
from armillary.data._layout import BatchLayout, InputContext, InputOptions
from armillary.distribute._global_arrays import is_key
from armillary.distribute.program._function import Functions
from armillary.distribute.replica._policy import check_annotations
from armillary.distribute.replica._run import run_alone
from armillary.distribute.strategies._layouts import MeshLayout, as_devices
from armillary.distribute.strategies._multi_worker import JoinedStrategy, order_devices
from armillary.distribute.strategies._rules import ShardingRules, axes_of
from armillary.errors import StateStructureError
from armillary.state._lift import State, as_array
from armillary.typing import PyTree
from armillary.xla._lowerings import partitioned

AXES = ("data", "fsdp", "tensor")
BATCH_AXES = ("data", "fsdp")
_KINDS = (AxisType.Auto,) * len(AXES)


class ShardedStrategy(JoinedStrategy):
    """One replica that spans all devices, each of which holds a part of its state.

    For models that leave no room on a device, with the step of any other strategy. XLA
    divides the program of a single device: batches are split over `data` and `fsdp`,
    parameters and the state of their optimizer over `fsdp` (ZeRO-3), and over `tensor`
    where a rule says so::

        strategy = armillary.ShardedStrategy(
            {"data": 2, "fsdp": 2, "tensor": 2},
            rules={"up/kernel": PartitionSpec("fsdp", "tensor")},
        )

    A step sees the global batch, so `num_replicas_in_sync` is 1, and numbers are those
    of one device: statistics of a batch are of all of it.

    In a job of several processes it joins them, as `MultiWorkerMirroredStrategy` does,
    and spans the devices of all: make it before anything uses a device. Each process
    reads the same global batches, and sends its devices their part.

    Args:
        mesh_shape: The number of devices along the axes `data`, `fsdp` and `tensor`;
            one that is left out has 1. By default all devices are along `fsdp`.
        rules: From regular expressions, searched for in the paths of parameters (such
            as `model/first/kernel`), to how such an array is split. The first that is
            found counts. Where none is, an array of 1024 values or more is split over
            `fsdp` along its longest axis that divides, and others are whole on every
            device. The state of an optimizer is split like the parameters.
        devices: The devices, or their names, with those of `tensor` side by side. By
            default all, one process after the other.
        cluster_resolver: Tells which process this is, and where the others are. By
            default `armillary.cluster.resolve_cluster()` finds out.
        communication_options: How values are exchanged between processes, and how long
            they wait for each other.

    Raises:
        ClusterError: If this process is to join others, but a device was used before,
            or it has joined another cluster.
        TypeError: If an argument is of another type.
        ValueError: If the mesh does not have as many devices as there are, a process
            has none in it, or a rule does not fit it.
    """

    _unit = "device"

    def __init__(
        self,
        mesh_shape: Mapping[str, int] | None = None,
        rules: Mapping[str, PartitionSpec] | None = None,
        devices: Sequence[Any] | None = None,
        cluster_resolver: ClusterResolver | None = None,
        communication_options: CommunicationOptions | None = None,
    ) -> None:
        sizes = _check_shape(mesh_shape)
        self._join(cluster_resolver, communication_options)
        if self.peers is not None and devices is None:
            devices = order_devices(jax.devices())
        found = np.asarray(as_devices("devices", devices))
        self._sizes = sizes
        if sizes is None:
            sizes = (1, len(found), 1)
        count = 1 if self.peers is None else self.peers.count
        if math.prod(sizes) != len(found):
            shown = dict(zip(AXES, sizes, strict=True))
            where = "" if count == 1 else f" in {count} processes"
            raise ValueError(
                f"`mesh_shape` is {shown}, for {math.prod(sizes)} devices, but there "
                f"are {len(found)}{where}. Choose sizes whose product is {len(found)}, "
                "or pass as many devices: `devices=jax.devices()[:n]`."
            )
        idle = set(range(count)).difference(d.process_index for d in found)
        if self.peers is not None and idle:
            raise ValueError(
                f"`devices` has none of process {min(idle)} of {count}, but all "
                "processes run each step. Leave it out, or take some of each from "
                "`jax.devices()`; names are of devices of this process."
            )
        mesh = Mesh(found.reshape(sizes), AXES, axis_types=_KINDS)
        self._rules = ShardingRules(mesh, rules)
        super().__init__(mesh, num_replicas=1)
        self._use(mesh)
        self._functions = Functions()

    def _use(self, mesh: Mesh | AbstractMesh) -> None:
        self._mesh = mesh
        self._layout = MeshLayout(mesh, BATCH_AXES, self.peers)
        self.split = self._layout.split

    def _describe(self, num_devices: int) -> None:
        # `fsdp` and `tensor` keep the sizes that they were given, and `data` grows.
        _, fsdp, tensor = self._sizes or (1, num_devices, 1)
        if num_devices % (fsdp * tensor):
            raise ValueError(
                f"There are {num_devices} devices to plan for, which `mesh_shape` does "
                f"not divide: it has {fsdp} along 'fsdp' and {tensor} along 'tensor', "
                "and what is left is 'data'. Choose sizes whose product divides "
                f"{num_devices}."
            )
        sizes = (num_devices // (fsdp * tensor), fsdp, tensor)
        self._use(AbstractMesh(sizes, AXES, axis_types=_KINDS))

    @property
    def layout(self) -> BatchLayout:
        """The examples of a batch split over `data` and `fsdp`."""
        return self._layout

    def distribute_datasets_from_function(
        self,
        dataset_fn: Callable[[InputContext], Any],
        options: InputOptions | None = None,
    ) -> DistributedDataset:
        """Returns a dataset that takes each global batch from the user's own.

        Its function is called with an `InputContext` of one replica. See
        `Strategy.distribute_datasets_from_function` for what it takes.

        Raises:
            ValueError: If it spans several processes.
        """
        if self.peers is not None:
            raise ValueError(
                "`distribute_datasets_from_function` (a function with an "
                "`input_context`) lets each process read data of its own, but under "
                f"{self!r} all processes share one replica, and with it each batch. "
                "Use `strategy.distribute_dataset(dataset)`, with the same data in "
                "each: a process takes only the rows for its own devices."
            )
        return super().distribute_datasets_from_function(dataset_fn, options)

    def state_shardings(self, state: State) -> Sequence[Sharding]:
        """Each array split by the rules.

        Raises:
            ValueError: If a rule does not fit an array, or no array matches it.
        """
        specs = self._rules.specs(state, self._mesh)
        return [NamedSharding(self._mesh, spec) for spec in specs]

    def _run(
        self, state: State | None, fn: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> PyTree:
        if state is None:
            return self._functions.get(fn, self)(*args, **kwargs)
        check_annotations(state)
        specs, held = self._rules.specs(state, self._mesh), state.read()
        of_optimizer = [part for s in state.slots for part in s.is_of_optimizer()]
        # Left to itself, the partitioner may divide what is computed from a parameter
        # as the parameter is divided, in place of the examples.
        collected = [
            leaf if is_not else self._divided(leaf, _without_batch_axes(spec))
            for leaf, spec, is_not in zip(held, specs, of_optimizer, strict=True)
        ]
        state.write(collected)
        with partitioned(self._layout.split):
            result = run_alone(self, fn, args, kwargs, state)
        for slot, start, stop in state.ranges:
            # Another structure is an error of the whole step, once it has ended.
            with contextlib.suppress(StateStructureError):
                pairs = zip(range(start, stop), slot.read(), strict=True)
                slot.write(
                    [
                        held[i]
                        if leaf is collected[i]
                        else self._divided(leaf, specs[i])
                        for i, leaf in pairs
                    ]
                )
        return result

    def _divided(self, leaf: Any, spec: PartitionSpec) -> Any:
        array = as_array(leaf)
        if array.ndim == 0 or is_key(array):
            return leaf
        sharding = NamedSharding(self._mesh, spec)
        return jax.lax.with_sharding_constraint(array, sharding)

    def __repr__(self) -> str:
        sizes = ", ".join(f"{k}={v}" for k, v in self._mesh.shape.items())
        where = "" if self.peers is None else f", {self.peers.count} processes"
        return f"ShardedStrategy({sizes}, {self.platform}, 1 replica{where})"


def _without_batch_axes(spec: PartitionSpec) -> PartitionSpec:
    kept = [
        tuple(axis for axis in axes_of(entry) if axis not in BATCH_AXES)
        for entry in spec
    ]
    return PartitionSpec(*[axes or None for axes in kept])


def _check_shape(mesh_shape: Any) -> tuple[int, ...] | None:
    if mesh_shape is None:
        return None
    fix = 'Use `mesh_shape={"fsdp": 8}`, or leave it out.'
    check_instance("mesh_shape", mesh_shape, Mapping, fix)
    for name, size in mesh_shape.items():
        if name not in AXES:
            raise ValueError(
                f"`mesh_shape` has an axis {name!r}, but axes are 'data' (batches are "
                "split), 'fsdp' (batches and state are split) and 'tensor' (state is "
                "split by `rules`). Use these names."
            )
        check_positive_int(f'mesh_shape["{name}"]', size)
    return tuple(int(mesh_shape.get(name, 1)) for name in AXES)
