"""Layouts of batches: on a device, over a mesh, or a row for each replica."""

import contextlib
import functools
import itertools
import math
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self, TypeAlias

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec, Sharding

from armillary._planned import has_stand_ins
from armillary.cluster._peers import ALONE, Peers
from armillary.data._layout import (
    ONE_PIPELINE,
    Active,
    Index,
    Pipelines,
    hosted_replicas,
)
from armillary.distribute._global_arrays import (
    as_global,
    everywhere,
    narrow_mesh,
    place_parts,
    place_rows,
)
from armillary.distribute.replica._values import PerReplica
from armillary.typing import PyTree

if TYPE_CHECKING:
    # Type checkers cannot see jax.Device, a class of the extension module.
    Device: TypeAlias = Any
else:
    Device = jax.Device


def as_device(name: str, device: Any) -> Device:
    """Returns a device given as a `jax.Device` or as a name such as `"gpu:1"`."""
    if isinstance(device, Device):
        return device

    # TensorFlow's names are paths, and their last part may begin with `device:`.
    parts = re.fullmatch(r"(?:.*/)?(?:device:)?(\w+):(\d+)", str(device).lower())
    # JAX does not know the platform, or has fewer devices.
    with contextlib.suppress(RuntimeError, IndexError):
        if parts is not None:
            platform, number = parts.groups()
            return jax.local_devices(backend=platform)[int(number)]
    known = ", ".join(map(_name, jax.local_devices()))
    raise ValueError(
        f"`{name}` is {device!r}, but this process has no such device. Its devices "
        f"are {known}: pass one of these names, or a `jax.Device`."
    )


def as_devices(name: str, devices: Any) -> list[Device]:
    """Returns a checked list of devices; all local devices for `None`."""
    if devices is None:
        found = list(jax.local_devices())
        return found[:1] if has_stand_ins() else found

    is_list = isinstance(devices, Sequence) and not isinstance(devices, str)
    if not is_list or not devices:
        raise ValueError(
            f"`{name}` is {devices!r}, but it must be a sequence of at least one "
            f'device. Use names as in `{name}=["cpu:0", "cpu:1"]`.'
        )
    found = [as_device(name, device) for device in devices]
    if len(set(found)) < len(found):
        raise ValueError(
            f"`{name}` is {list(map(_name, found))}, which repeats a device. Name each "
            "device once."
        )
    return found


def _name(device: Device) -> str:
    return f"{device.platform}:{device.id}"


class _OneReplica:
    """The common part of the layouts of one replica."""

    num_replicas = 1
    local_replicas = range(1)
    pipelines = ONE_PIPELINE
    stacked = False

    def of_strategy(self) -> Self:
        return self

    def wrap(self, arrays: PyTree, active: Active) -> PyTree:
        del active
        return arrays


class _TakesAll:
    """A layout that places all rows that a process has."""

    def own_parts(self, shape: tuple[int, ...], leading_axes: int) -> list[Index]:
        del leading_axes
        return [(slice(None),) * len(shape)]


@dataclass(frozen=True)
class SingleLayout(_OneReplica, _TakesAll):
    """Undivided batches on one device; `None` is JAX's default device."""

    sharding: Sharding | None

    num_shares = 1
    peers = ALONE

    def of_pipelines(self) -> Self:
        return self

    def count_parts(self, num_examples: int) -> int:
        del num_examples
        return 1

    def placed_types(self, types: PyTree, leading: tuple[int, ...] = ()) -> PyTree:
        return _describe(
            types,
            lambda shape: (*leading, *shape),
            lambda _: self.sharding,
        )

    def place(
        self, arrays: PyTree, leading_axes: int = 0, num_replicas: int | None = None
    ) -> PyTree:
        del leading_axes, num_replicas
        return jax.device_put(arrays, self.sharding)

    @property
    def devices(self) -> Collection[Any]:
        if self.sharding is not None:
            return self.sharding.device_set
        default = jax.config.jax_default_device  # pyright: ignore[reportAttributeAccessIssue]
        if isinstance(default, str | None):
            return jax.local_devices(backend=default)[:1]
        return (default,)

    def replicate(self, arrays: PyTree) -> PyTree:
        return jax.device_put(arrays, self.sharding)

    def gather(self, arrays: PyTree, rows: Any) -> PyTree:
        return _take(arrays, rows)


@dataclass(frozen=True)
class _OnMesh:
    """The common part of the layouts of several devices."""

    mesh: Any
    peers: Peers = ALONE

    @property
    def devices(self) -> Collection[Any]:
        return self.mesh.local_devices

    def replicate(self, arrays: PyTree) -> PyTree:
        sharding = everywhere(self.mesh)
        if self.peers.is_alone:
            return jax.device_put(arrays, sharding)
        return jax.tree.map(lambda leaf: as_global(leaf, sharding), arrays)


@dataclass(frozen=True)
class ReplicaLayout(_OnMesh, _TakesAll):
    """One row of a batch on each device of a mesh, ordered by process."""

    stacked = True

    @property
    def pipelines(self) -> Pipelines:
        return tuple((index,) for index in range(self.peers.count))

    def of_pipelines(self) -> Self:
        return self

    def of_strategy(self) -> Self:
        return self

    @property
    def local_replicas(self) -> range:
        if self.peers.is_alone:
            return range(self.num_replicas)
        owners = [device.process_index for device in self.mesh.devices.flat]
        start = owners.index(self.peers.index)
        return range(start, start + owners.count(self.peers.index))

    @property
    def axis_name(self) -> str:
        (name,) = self.mesh.axis_names
        return name

    @property
    def num_replicas(self) -> int:
        return self.mesh.size

    num_shares = num_replicas

    def count_parts(self, num_examples: int) -> int:
        del num_examples
        return self.num_replicas

    def placed_types(self, types: PyTree, leading: tuple[int, ...] = ()) -> PyTree:
        sharding = self._sharding(len(leading), None)
        return _describe(
            types,
            lambda shape: (*leading, self.num_replicas, *shape),
            lambda _: sharding,
        )

    def place(
        self, arrays: PyTree, leading_axes: int = 0, num_replicas: int | None = None
    ) -> PyTree:
        sharding = self._sharding(leading_axes, num_replicas)
        if self.peers.is_alone:
            return jax.device_put(arrays, sharding)
        count = num_replicas or self.num_replicas
        rows = hosted_replicas(self.local_replicas, self.num_replicas, count)
        return place_rows(arrays, sharding, leading_axes, rows, count)

    def _sharding(self, leading_axes: int, num_replicas: int | None) -> NamedSharding:
        """Returns the sharding of an array with the replicas behind other axes."""
        mesh = narrow_mesh(self.mesh, num_replicas)
        spec = PartitionSpec(*[None] * leading_axes, self.axis_name)
        return NamedSharding(mesh, spec)

    def gather(self, arrays: PyTree, rows: Any) -> PyTree:
        mesh = narrow_mesh(self.mesh, len(rows))
        spec = PartitionSpec(self.axis_name)
        return _take_locally(mesh, spec, arrays, rows)

    def wrap(self, arrays: PyTree, active: Active) -> PyTree:
        return jax.tree.map(lambda leaf: PerReplica(leaf, active), arrays)


@dataclass(frozen=True)
class MeshLayout(_OneReplica, _OnMesh):
    """Batches of one replica, split over the most of `axes` that divide them."""

    axes: tuple[str, ...] = ()

    @property
    def num_shares(self) -> int:
        return math.prod(self.mesh.shape[axis] for axis in self.axes)

    def count_parts(self, num_examples: int) -> int:
        return math.prod(self.mesh.shape[axis] for axis in self._axes_for(num_examples))

    def placed_types(self, types: PyTree, leading: tuple[int, ...] = ()) -> PyTree:
        def whole(shape: tuple[int, ...]) -> tuple[int, ...]:
            """Returns the shape of a batch, from the shape of one of its parts."""
            num_rows, *others = shape
            return (*leading, num_rows * self.num_shares, *others)

        return _describe(
            types,
            whole,
            lambda shape: self.sharding_of(shape, len(leading)),
        )

    def place(
        self, arrays: PyTree, leading_axes: int = 0, num_replicas: int | None = None
    ) -> PyTree:
        del num_replicas

        def shard(leaf: Any) -> NamedSharding:
            return self.sharding_of(np.shape(leaf), leading_axes)

        shardings = jax.tree.map(shard, arrays)
        if self.peers.is_alone:
            return jax.device_put(arrays, shardings)
        return jax.tree.map(place_parts, arrays, shardings)

    def own_parts(self, shape: tuple[int, ...], leading_axes: int) -> list[Index]:
        sharding = self.sharding_of(shape, leading_axes)
        indices = sharding.addressable_devices_indices_map(shape).values()
        return [index for index in indices if index is not None]

    def sharding_of(self, shape: tuple[int, ...], axis: int | None) -> NamedSharding:
        """Returns the sharding of an array with its examples along `axis`, if any."""
        if axis is None or axis >= len(shape):
            return everywhere(self.mesh)
        spec = PartitionSpec(*[None] * axis, self._axes_for(shape[axis]))
        return NamedSharding(self.mesh, spec)

    def _axes_for(self, num_examples: int) -> tuple[str, ...]:
        """Returns the axes with the most devices that divide `num_examples`."""
        best: tuple[str, ...] = ()
        most_devices = 1
        for length in range(1, len(self.axes) + 1):
            for axes in itertools.combinations(self.axes, length):
                num_devices = math.prod(self.mesh.shape[axis] for axis in axes)
                is_fitting = num_examples % num_devices == 0
                if is_fitting and num_devices > most_devices:
                    best = axes
                    most_devices = num_devices
        return best

    def gather(self, arrays: PyTree, rows: Any) -> PyTree:
        spec = PartitionSpec(self._axes_for(len(rows)))
        return _take_locally(self.mesh, spec, arrays, rows)

    def of_strategy(self) -> "MeshLayout":
        return self

    def of_pipelines(self) -> "MeshLayout":
        """Returns the layout of datasets that differ between input pipelines.

        Raises:
            ValueError: If processes have some parts of a batch in common, and others
                not, or have different numbers of parts.
        """
        if self.peers.is_alone:
            return self
        return PipelineLayout(self.mesh, self.peers, self.axes)


@dataclass(frozen=True)
class PipelineLayout(MeshLayout):
    """Batches whose rows come from several input pipelines.

    Each process has the rows of its own pipeline, for all parts of a batch that its
    devices hold. Processes whose devices hold the same parts share a pipeline.
    """

    def __post_init__(self) -> None:
        parts = self._parts_of_processes
        counts = [len(own) for own in set(parts.values())]
        # A part in two different sets of parts would count twice.
        are_separate = sum(counts) == self.num_shares
        are_equal = len(set(counts)) == 1
        if not are_separate or not are_equal:
            lines = "\n".join(
                f"  process {process}: {', '.join(map(str, own))}"
                for process, own in parts.items()
            )
            raise ValueError(
                "The function with an `input_context` makes one dataset for each group "
                f"of processes, but the mesh {dict(self.mesh.shape)} divides a batch "
                "so that processes have some parts in common, or different numbers of "
                f"parts:\n{lines}\nUse a mesh in which two processes hold the same "
                "parts or different parts, such as one whose last axes lie within a "
                "process. Or use `strategy.distribute_dataset(dataset)`, with the same "
                "data in each process."
            )

    @functools.cached_property
    def _parts_of_processes(self) -> dict[int, tuple[int, ...]]:
        """The numbers of the parts of a batch that the devices of a process hold."""
        # An array with one number for each part shows which device holds which part.
        sharding = NamedSharding(self.mesh, PartitionSpec(self.axes))
        indices = sharding.devices_indices_map((self.num_shares,))
        held: dict[int, set[int]] = {}
        for device, index in indices.items():
            assert index is not None
            part = index[0].start or 0
            held.setdefault(device.process_index, set()).add(part)
        return {process: tuple(sorted(own)) for process, own in sorted(held.items())}

    @functools.cached_property
    def pipelines(self) -> Pipelines:
        by_parts: dict[tuple[int, ...], list[int]] = {}
        for process, own in self._parts_of_processes.items():
            by_parts.setdefault(own, []).append(process)
        return tuple(tuple(by_parts[own]) for own in sorted(by_parts))

    def place(
        self, arrays: PyTree, leading_axes: int = 0, num_replicas: int | None = None
    ) -> PyTree:
        """Returns global arrays, from the rows of this process."""
        del num_replicas
        own = self._parts_of_processes[self.peers.index]

        def place(leaf: Any) -> jax.Array:
            host = np.asarray(leaf)
            size = host.shape[leading_axes] // len(own)
            before = host.shape[:leading_axes]
            after = host.shape[leading_axes + 1 :]
            shape = (*before, size * self.num_shares, *after)

            def read(index: Index | None) -> np.ndarray:
                # From a part of the global batch to a part of this process.
                assert index is not None
                first_row = index[leading_axes].start or 0
                part = first_row // max(size, 1)
                start = own.index(part) * size
                rows = slice(start, start + size)
                return host[(*index[:leading_axes], rows)]

            sharding = self.sharding_of(shape, leading_axes)
            return jax.make_array_from_callback(shape, sharding, read)

        return jax.tree.map(place, arrays)

    def of_pipelines(self) -> Self:
        return self

    def of_strategy(self) -> MeshLayout:
        return MeshLayout(self.mesh, self.peers, self.axes)


def _describe(
    types: PyTree,
    shape_of: Callable[[tuple[int, ...]], tuple[int, ...]],
    sharding_of: Callable[[tuple[int, ...]], Sharding | None],
) -> PyTree:
    def describe(leaf: Any) -> jax.ShapeDtypeStruct:
        shape = shape_of(leaf.shape)
        return jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=sharding_of(shape))

    return jax.tree.map(describe, types)


def _take_locally(
    mesh: Mesh | AbstractMesh,
    spec: PartitionSpec,
    arrays: PyTree,
    rows: Any,
) -> PyTree:
    """Takes rows on each device, from its own copy of the arrays."""
    # Without `shard_map`, XLA's partitioner might gather rows with collectives.
    local_take = jax.shard_map(
        _take,
        mesh=mesh,
        in_specs=(PartitionSpec(), spec),
        out_specs=spec,
        check_vma=False,
    )
    return local_take(arrays, rows)


def _take(arrays: PyTree, rows: Any) -> PyTree:
    # Row numbers come from the dataset itself, so they need no check on the device.
    return jax.tree.map(
        lambda array: array.at[rows].get(mode="promise_in_bounds"), arrays
    )
