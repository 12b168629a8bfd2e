"""Where batches go: one device, or one row for each replica of a mesh."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from armillary.data._layout import Active, Peers, hosted_replicas
from armillary.distribute._global_arrays import everywhere, replicate, split
from armillary.distribute.replica._narrow import narrow_mesh
from armillary.distribute.replica._policy import AXIS_NAME
from armillary.distribute.replica._values import PerReplica
from armillary.typing import PyTree


@dataclass(frozen=True)
class SingleLayout:
    """Batches as they are, for a strategy with one replica and no mesh.

    Args:
        sharding: Where they go, or `None` for JAX's default device.
    """

    sharding: Sharding | None

    num_replicas = 1
    local_replicas = range(1)
    stacked = False
    peers = None

    def place(
        self, arrays: PyTree, leading_axes: int = 0, num_replicas: int | None = None
    ) -> PyTree:
        """Returns host arrays as device arrays."""
        del leading_axes, num_replicas
        return jax.device_put(arrays, self.sharding)

    @property
    def devices(self) -> Collection[Any]:
        """The device."""
        if self.sharding is not None:
            return self.sharding.device_set
        default = jax.config.jax_default_device  # pyright: ignore[reportAttributeAccessIssue]
        if isinstance(default, str | None):
            return jax.local_devices(backend=default)[:1]
        return (default,)

    def replicate(self, arrays: PyTree) -> PyTree:
        """Returns host arrays as device arrays."""
        return jax.device_put(arrays, self.sharding)

    def gather(self, arrays: PyTree, rows: Any) -> PyTree:
        """Returns rows of device arrays."""
        return _take(arrays, rows)

    def wrap(self, arrays: PyTree, num_active: Active) -> PyTree:
        """Returns the arrays themselves."""
        del num_active
        return arrays


@dataclass(frozen=True)
class ReplicaLayout:
    """One row of a batch on each device of a mesh.

    Args:
        mesh: A mesh with the axis `replica`.
    """

    mesh: Mesh

    stacked = True

    @property
    def local_replicas(self) -> range:
        """All replicas: they are all in this process."""
        return range(self.num_replicas)

    @property
    def peers(self) -> Peers | None:
        """There are no others."""
        return None

    @property
    def num_replicas(self) -> int:
        """One replica for each device."""
        return self.mesh.shape[AXIS_NAME]

    def place(
        self, arrays: PyTree, leading_axes: int = 0, num_replicas: int | None = None
    ) -> PyTree:
        """Returns host arrays as device arrays, split over replicas."""
        return jax.device_put(arrays, self._sharding(leading_axes, num_replicas))

    def _sharding(self, leading_axes: int, num_replicas: int | None) -> NamedSharding:
        spec = PartitionSpec(*[None] * leading_axes, AXIS_NAME)
        return NamedSharding(narrow_mesh(self.mesh, num_replicas), spec)

    @property
    def devices(self) -> Collection[Any]:
        """The devices of the mesh that this process feeds."""
        return self.mesh.local_devices

    def replicate(self, arrays: PyTree) -> PyTree:
        """Returns host arrays as device arrays, whole on each device."""
        return jax.device_put(arrays, everywhere(self.mesh))

    def gather(self, arrays: PyTree, rows: Any) -> PyTree:
        """Returns rows of replicated arrays, split over replicas as `rows` is."""
        # Left to itself, the partitioner may choose to gather with collectives.
        local_take = jax.shard_map(
            _take,
            mesh=narrow_mesh(self.mesh, len(rows)),
            in_specs=(PartitionSpec(), PartitionSpec(AXIS_NAME)),
            out_specs=PartitionSpec(AXIS_NAME),
        )
        with jax.auto_pcast(True):
            return local_take(arrays, rows)

    def wrap(self, arrays: PyTree, num_active: Active) -> PyTree:
        """Returns each array as a `PerReplica`."""

        def wrap_leaf(leaf: Any) -> PerReplica:
            return PerReplica(leaf, num_active)

        return jax.tree.map(wrap_leaf, arrays)


@dataclass(frozen=True)
class ProcessLayout(ReplicaLayout):
    """One row of a batch on each device of a mesh that spans processes.

    Args:
        mesh: A mesh with the axis `replica`, the devices of each process in a row.
        processes: Whose devices they are.
    """

    processes: Peers

    @property
    def peers(self) -> Peers | None:
        """The processes."""
        return self.processes

    @property
    def local_replicas(self) -> range:
        """The replicas on devices of this process."""
        owners = [device.process_index for device in self.mesh.devices.flat]
        start = owners.index(self.processes.index)
        return range(start, start + owners.count(self.processes.index))

    def place(
        self, arrays: PyTree, leading_axes: int = 0, num_replicas: int | None = None
    ) -> PyTree:
        """Returns this process's rows as device arrays that span all processes."""
        count = num_replicas or self.num_replicas
        rows = hosted_replicas(self.local_replicas, self.num_replicas, count)
        sharding = self._sharding(leading_axes, count)
        return split(arrays, sharding, leading_axes, rows, count)

    def replicate(self, arrays: PyTree) -> PyTree:
        """Returns host arrays as device arrays, whole on each device."""
        sharding = everywhere(self.mesh)
        return jax.tree.map(lambda leaf: replicate(leaf, sharding), arrays)


def _take(arrays: PyTree, rows: Any) -> PyTree:
    # Row numbers come from the data set itself, so checks on the device find nothing.
    return jax.tree.map(
        lambda array: array.at[rows].get(mode="promise_in_bounds"), arrays
    )
