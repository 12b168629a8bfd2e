"""Where batches go: one device, or one row for each replica of a mesh."""

from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from armillary._typing import PyTree
from armillary.distribute._values import PerReplica
from armillary.distribute._variables import AXIS_NAME


@dataclass(frozen=True)
class SingleLayout:
    """Batches as they are, for a strategy with one replica and no mesh.

    Args:
        sharding: Where they go, or `None` for JAX's default device.
    """

    sharding: Sharding | None

    num_replicas = 1
    stacked = False

    def place(self, arrays: PyTree, leading_axes: int = 0) -> PyTree:
        """Returns host arrays as device arrays."""
        del leading_axes
        return jax.device_put(arrays, self.sharding)

    def wrap(self, arrays: PyTree, num_active: int) -> PyTree:
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
    def num_replicas(self) -> int:
        """One replica for each device."""
        return self.mesh.shape[AXIS_NAME]

    def place(self, arrays: PyTree, leading_axes: int = 0) -> PyTree:
        """Returns host arrays as device arrays, split over replicas."""
        spec = PartitionSpec(*[None] * leading_axes, AXIS_NAME)
        return jax.device_put(arrays, NamedSharding(self.mesh, spec))

    def wrap(self, arrays: PyTree, num_active: int) -> PyTree:
        """Returns each array as a `PerReplica`."""

        def wrap_leaf(leaf: Any) -> PerReplica:
            return PerReplica(leaf, num_active)

        return jax.tree.map(wrap_leaf, arrays)
