"""Parameters and optimizer state split over devices, by the compiler."""

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import jax
import numpy as np
from jax.extend import core
from jax.sharding import (
    AxisType,
    Mesh,
    NamedSharding,
    PartitionSpec,
)

from armillary._checks import check_instance, check_positive_int
from armillary.cluster._communication import CommunicationOptions
from armillary.cluster._peers import Peers
from armillary.cluster.resolvers._resolver import ClusterResolver
from armillary.distribute._global_arrays import is_key
from armillary.distribute.program._function import FunctionCache
from armillary.distribute.replica._axis import DEFAULT_AXIS_NAME, check_axis_name
from armillary.distribute.replica._context import lifted_shardings, lifted_state
from armillary.distribute.replica._policy import check_annotations
from armillary.distribute.replica._program_mesh import without_program_mesh
from armillary.distribute.replica._run_alone import run_alone
from armillary.distribute.strategies._collection import collect_at_use
from armillary.distribute.strategies._layouts import MeshLayout, as_devices
from armillary.distribute.strategies._multi_worker import JoinedStrategy, order_devices
from armillary.distribute.strategies._placements import ShardedPlacement
from armillary.distribute.strategies._rules import Rules
from armillary.errors import StateStructureError
from armillary.state._lift import State, as_array
from armillary.typing import PyTree
from armillary.xla._lowerings import partitioned

AXES = ("data", "fsdp", "tensor")
BATCH_AXES = ("data", "fsdp")
_KINDS = (AxisType.Auto,) * len(AXES)


class ShardedStrategy(JoinedStrategy):
    """One replica that spans all devices, each of which holds a part of its state.

    Use it for models that do not fit on one device. The step is the same as under other
    strategies. XLA divides the program of a single device. Batches are split over
    `data` and `fsdp`. Parameters and the state of their optimizer are split over `fsdp`
    (ZeRO-3), and over `tensor` if a rule says so::

        strategy = armillary.ShardedStrategy(
            {"data": 2, "fsdp": 2, "tensor": 2},
            rules={"up/kernel": PartitionSpec("fsdp", "tensor")},
        )

    A step sees the global batch. So `num_replicas_in_sync` is 1, and numbers equal the
    numbers of one device. Batch statistics are over the whole batch.

    In a job of several processes, it joins them, as `MultiWorkerMirroredStrategy` does,
    and uses the devices of all processes. So make it before anything uses a device.
    Each process reads the same global batches, and sends its devices their part.

    Args:
        mesh_shape: The number of devices along the axes `data`, `fsdp` and `tensor`. An
            axis that is left out has size 1. By default, all devices are along `fsdp`.
        rules: A dictionary from regular expressions to a `PartitionSpec`. An expression
            is searched for in the paths of parameters (such as `model/first/kernel`),
            and the first expression that is found counts. It counts for parameters that
            are not divided over these devices already, and that the model does not
            annotate. Without a rule, an array of at least 1024 values is split over
            `fsdp`, along the longest axis that the devices divide. All other arrays are
            whole on every device. The state of an optimizer is split like the
            parameters.
        devices: The devices, or their names, with the devices of `tensor` next to each
            other. By default all devices, one process after the other.
        cluster_resolver: Describes this process and the other processes. By default,
            `armillary.cluster.resolve_cluster()` finds the resolver.
        communication_options: The way to exchange values between processes, and the
            time that processes wait for each other.
        axis_name: As for `MirroredStrategy`. The axis has length 1 here, because there
            is one replica. `data`, `fsdp` and `tensor` are axes of the mesh.
        logical_rules: A dictionary from the names in a model's annotations, such as
            `"embed"`, to an axis of the mesh, several axes, or `None` to leave an axis
            of the array whole. The name of an axis of the mesh needs no rule.
            Annotations are the sharding metadata of variables of Flax NNX, the boxes of
            Linen, and the layouts of Keras.

    Raises:
        ClusterError: If this process must join others, but a device was used before,
            this process has joined another cluster, or it is a `ps`.
        TypeError: If an argument is of the wrong type.
        ValueError: If the mesh has more or fewer devices than there are, a process has
            no device in it, a rule does not fit it, or `axis_name` is empty or an axis
            of the mesh.
    """

    def __init__(
        self,
        mesh_shape: Mapping[str, int] | None = None,
        rules: Mapping[str, PartitionSpec] | None = None,
        devices: Sequence[Any] | None = None,
        cluster_resolver: ClusterResolver | None = None,
        communication_options: CommunicationOptions | None = None,
        *,
        axis_name: str = DEFAULT_AXIS_NAME,
        logical_rules: Mapping[str, Any] | None = None,
    ) -> None:
        check_axis_name(axis_name, AXES)
        given = _check_shape(mesh_shape)
        self._join(cluster_resolver, communication_options)
        peers = self._peers
        if not peers.is_alone and devices is None:
            devices = order_devices(jax.devices())
        found = np.asarray(as_devices("devices", devices))
        sizes = given or (1, len(found), 1)
        _check_devices(found, sizes, peers)

        mesh = Mesh(found.reshape(sizes), AXES, axis_types=_KINDS)
        placement = ShardedPlacement(
            MeshLayout(mesh, peers, BATCH_AXES),
            mesh,
            rules=Rules(mesh, rules, logical_rules),
            sizes=given,
        )
        super().__init__(placement, axis_name)
        self._functions = FunctionCache()

    @property
    def _placement(self) -> ShardedPlacement:
        return self.placement  # pyright: ignore[reportReturnType]

    def leave_program_mesh(self) -> AbstractContextManager[Any]:
        """Leaves every mesh except this strategy's mesh, which a step may use."""
        return without_program_mesh(self.mesh)

    def _run(
        self, state: State | None, fn: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> PyTree:
        if state is None:
            return self._functions.get(fn, self)(*args, **kwargs)
        check_annotations(state)
        specs = self._specs_of(state)
        held = state.read()
        of_optimizer = state.of_optimizer
        parameters: list[PartitionSpec | None] = []
        for leaf, spec, is_not in zip(held, specs, of_optimizer, strict=True):
            is_parameter = not is_not and _may_be_constrained(leaf)
            parameters.append(spec if is_parameter else None)

        def collect(program: core.ClosedJaxpr) -> core.ClosedJaxpr:
            return collect_at_use(program, parameters, self.placement.mesh, BATCH_AXES)

        with partitioned(self._placement.split):
            result = run_alone(self, fn, args, kwargs, state, edit=collect)
        for slot, start, _ in state.ranges:
            # A different structure is reported when the whole step has ended.
            with contextlib.suppress(StateStructureError):
                new = slot.read()
                for i, leaf in enumerate(new, start=start):
                    is_old = leaf is held[i]
                    if not is_old and _may_be_constrained(leaf):
                        new[i - start] = self._divided(leaf, specs[i])
                slot.write(new)
        return result

    def _specs_of(self, state: State) -> list[PartitionSpec]:
        """Returns the division of each array of the state of a step."""
        shardings = lifted_shardings()
        if shardings is None or state is not lifted_state():
            return self._placement.specs(state)
        # Inside the step, the arrays are tracers, which do not show where they lie.
        return [sharding.spec for sharding in shardings]

    def _divided(self, leaf: Any, spec: PartitionSpec) -> Any:
        sharding = NamedSharding(self.placement.mesh, spec)
        return jax.lax.with_sharding_constraint(as_array(leaf), sharding)

    def __repr__(self) -> str:
        sizes = ", ".join(f"{k}={v}" for k, v in self.placement.mesh.shape.items())
        where = "" if self._peers.is_alone else f", {self._peers.count} processes"
        return f"ShardedStrategy({sizes}, {self.platform}, 1 replica{where})"


def _may_be_constrained(leaf: Any) -> bool:
    array = as_array(leaf)
    return array.ndim > 0 and not is_key(array)


def _check_devices(devices: Any, sizes: Sequence[int], peers: Peers) -> None:
    """Raises if devices do not fill a mesh, or leave out a process."""
    count = peers.count
    if math.prod(sizes) != len(devices):
        shown = dict(zip(AXES, sizes, strict=True))
        where = "" if count == 1 else f" in {count} processes"
        raise ValueError(
            f"`mesh_shape` is {shown}, for {math.prod(sizes)} devices, but there are "
            f"{len(devices)}{where}. Choose sizes whose product is {len(devices)}."
        )
    idle = set(range(count)).difference(each.process_index for each in devices)
    if idle and not peers.is_alone:
        raise ValueError(
            f"`devices` has no device of process {min(idle)} of {count}, but all "
            "processes run each step. Leave `devices` out, or take devices of each "
            "process from `jax.devices()`."
        )


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
