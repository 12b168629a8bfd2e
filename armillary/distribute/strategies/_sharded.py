"""Parameters and optimizer state split over devices, by the compiler.

Scalars, random keys and metrics are whole on every device. An array of an optimizer is
split like a parameter of the same shape: the parameter whose path has the most names in
common at its end. For example, `optimizer/opt_state/0/mu/first/kernel` is split like
`model/first/kernel`.
"""

import contextlib
import itertools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
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

from armillary._checks import check_instance, check_positive_int, list_lines
from armillary.cluster._communication import CommunicationOptions
from armillary.cluster.resolvers._resolver import ClusterResolver
from armillary.data._layout import BatchLayout
from armillary.distribute._global_arrays import is_key
from armillary.distribute.program._function import Functions
from armillary.distribute.replica._axis import DEFAULT_AXIS_NAME, check_axis_name
from armillary.distribute.replica._policy import check_annotations
from armillary.distribute.replica._program_mesh import without_program_mesh
from armillary.distribute.replica._run import run_alone
from armillary.distribute.strategies._layouts import MeshLayout, as_devices
from armillary.distribute.strategies._multi_worker import JoinedStrategy, order_devices
from armillary.errors import StateStructureError
from armillary.state._lift import State, as_array
from armillary.state._slots import Role, describe
from armillary.typing import PyTree
from armillary.xla._lowerings import partitioned

AXES = ("data", "fsdp", "tensor")
BATCH_AXES = ("data", "fsdp")
SMALL = 1024
"""Arrays of fewer values are not split, because collecting them costs too much."""
_KINDS = (AxisType.Auto,) * len(AXES)
_AnyMesh = Mesh | AbstractMesh


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
            and the first expression that is found counts. Without a rule, an array of
            at least 1024 values is split over `fsdp`, along the longest axis that the
            devices divide. All other arrays are whole on every device. The state of an
            optimizer is split like the parameters.
        devices: The devices, or their names, with the devices of `tensor` next to each
            other. By default all devices, one process after the other.
        cluster_resolver: Describes this process and the other processes. By default,
            `armillary.cluster.resolve_cluster()` finds the resolver.
        communication_options: The way to exchange values between processes, and the
            time that processes wait for each other.
        axis_name: As for `MirroredStrategy`. The axis has length 1 here, because there
            is one replica. `data`, `fsdp` and `tensor` are axes of the mesh.

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
    ) -> None:
        check_axis_name(axis_name, AXES)
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
                f"are {len(found)}{where}. Choose sizes whose product is {len(found)}."
            )
        idle = set(range(count)).difference(d.process_index for d in found)
        if self.peers is not None and idle:
            raise ValueError(
                f"`devices` has no device of process {min(idle)} of {count}, but all "
                "processes run each step. Leave `devices` out, or take devices of each "
                "process from `jax.devices()`."
            )
        mesh = Mesh(found.reshape(sizes), AXES, axis_types=_KINDS)
        self._rules = _Rules(mesh, rules)
        super().__init__(mesh, num_replicas=1, axis_name=axis_name)
        self._use(mesh)
        self._functions = Functions()

    def _use(self, mesh: _AnyMesh) -> None:
        self._mesh = mesh
        self._layout = MeshLayout(mesh, self.peers, BATCH_AXES)
        self.split = self._layout.split

    def _describe(self, num_devices: int) -> None:
        # `fsdp` and `tensor` keep their sizes, and `data` grows.
        _, fsdp, tensor = self._sizes or (1, num_devices, 1)
        if num_devices % (fsdp * tensor):
            raise ValueError(
                f"There are {num_devices} devices to plan for, which `mesh_shape` does "
                f"not divide: it has {fsdp} along 'fsdp' and {tensor} along 'tensor'. "
                f"Choose sizes whose product divides {num_devices}."
            )
        sizes = (num_devices // (fsdp * tensor), fsdp, tensor)
        self._use(AbstractMesh(sizes, AXES, axis_types=_KINDS))

    @property
    def layout(self) -> BatchLayout:
        """The examples of a batch split over `data` and `fsdp`."""
        return self._layout

    def leave_program_mesh(self) -> AbstractContextManager[Any]:
        """Leaves every mesh except this strategy's mesh, which a step may use."""
        return without_program_mesh(self._mesh)

    def state_shardings(self, state: State) -> Sequence[Sharding]:
        """Each array split by the rules."""
        specs = self._rules.specs(state, self._mesh)
        return [NamedSharding(self._mesh, spec) for spec in specs]

    def _run(
        self, state: State | None, fn: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> PyTree:
        if state is None:
            return self._functions.get(fn, self)(*args, **kwargs)
        check_annotations(state)
        specs = self._rules.specs(state, self._mesh)
        held = state.read()
        of_optimizer = [part for s in state.slots for part in s.is_of_optimizer()]
        # Without these constraints, XLA's partitioner might divide the results of a
        # parameter like the parameter itself, instead of by examples.
        collected = [
            leaf if is_not else self._divided(leaf, _without_batch_axes(spec))
            for leaf, spec, is_not in zip(held, specs, of_optimizer, strict=True)
        ]
        state.write(collected)
        with partitioned(self._layout.split):
            result = run_alone(self, fn, args, kwargs, state)
        for slot, start, _ in state.ranges:
            # A different structure is reported when the whole step has ended.
            with contextlib.suppress(StateStructureError):
                new = slot.read()
                for i, leaf in enumerate(new, start=start):
                    is_old = leaf is collected[i]
                    new[i - start] = (
                        held[i] if is_old else self._divided(leaf, specs[i])
                    )
                slot.write(new)
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
        tuple(axis for axis in _axes_of(entry) if axis not in BATCH_AXES)
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


class _Rules:
    """Chooses a `PartitionSpec` for each array of a state."""

    def __init__(self, mesh: Mesh, rules: Mapping[str, PartitionSpec] | None) -> None:
        fix = 'Write `rules={"kernel": PartitionSpec("fsdp", "tensor")}`.'
        check_instance("rules", rules, Mapping | None, fix)
        for path, spec in (rules or {}).items():
            check_instance("rules", path, str, fix)
            check_instance(f'rules["{path}"]', spec, PartitionSpec, fix)
            NamedSharding(mesh, spec)  # JAX refuses axes that are not in the mesh.
        self._rules = {re.compile(path): spec for path, spec in (rules or {}).items()}
        # The rules that have not matched an array of any program yet.
        self._unused = set(self._rules)

    def specs(self, state: State, mesh: _AnyMesh) -> list[PartitionSpec]:
        """Returns the spec of each array of a state, in the order of its paths."""
        leaves = [as_array(leaf) for leaf in state.read()]
        of_optimizer = [part for s in state.slots for part in s.is_of_optimizer()]
        split = [
            i
            for i, (leaf, kind) in enumerate(zip(leaves, state.kinds, strict=True))
            if leaf.ndim and not is_key(leaf) and kind.role is not Role.METRIC
        ]
        specs = [PartitionSpec()] * len(leaves)
        own = [i for i in split if not of_optimizer[i]]
        for i in own:
            specs[i] = self._match(state.paths[i], leaves[i], mesh)
        if self._unused and any(state.kinds[i].role is Role.PLAIN for i in own):
            unused = " and ".join(repr(pattern.pattern) for pattern in self._unused)
            raise ValueError(
                f"`rules` has {unused}, found in none of these paths:\n"
                f"{list_lines(state.paths[i] for i in own)}\n"
                "Correct it, or leave it out: scalars, metrics and random keys need no "
                "rule, and the state of an optimizer follows the parameters."
            )
        for i in set(split).difference(own):
            path = state.paths[i]
            shape = leaves[i].shape
            alike = [j for j in own if leaves[j].shape == shape]
            shared = [(_num_shared(path, state.paths[j]), j) for j in alike]
            most, j = max(shared, key=lambda pair: pair[0], default=(0, 0))
            specs[i] = specs[j] if most else _automatic(mesh, shape)
        return specs

    def _match(self, path: str, leaf: Any, mesh: _AnyMesh) -> PartitionSpec:
        found = [pattern for pattern in self._rules if pattern.search(path)]
        self._unused.difference_update(found)
        if not found:
            return _automatic(mesh, leaf.shape)
        spec = self._rules[found[0]]
        sizes = [math.prod(mesh.shape[x] for x in _axes_of(entry)) for entry in spec]
        pairs = zip(leaf.shape, sizes, strict=False)
        if len(sizes) > leaf.ndim or any(size % count for size, count in pairs):
            raise ValueError(
                f"`rules` has {found[0].pattern!r}: {spec}, which does not fit {path}, "
                f"{describe(leaf)}: devices cannot share an axis of it equally. Add an "
                "earlier rule for this array. `PartitionSpec()` leaves it whole on "
                "every device."
            )
        return spec


def _automatic(mesh: _AnyMesh, shape: tuple[int, ...]) -> PartitionSpec:
    count = mesh.shape["fsdp"]
    fitting = [axis for axis, size in enumerate(shape) if size % count == 0]
    if count == 1 or math.prod(shape) < SMALL or not fitting:
        return PartitionSpec()
    longest = max(fitting, key=lambda axis: shape[axis])
    return PartitionSpec(*[None] * longest, "fsdp")


def _axes_of(entry: Any) -> tuple[str, ...]:
    """Returns the axes of the mesh that one entry of a `PartitionSpec` names."""
    return () if entry is None else entry if isinstance(entry, tuple) else (entry,)


def _num_shared(path: str, other: str) -> int:
    """Returns the number of equal names at the end of two paths."""
    pairs = zip(reversed(path.split("/")), reversed(other.split("/")), strict=False)
    return len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)))
