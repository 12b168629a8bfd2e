"""Placements on one device, on replicas, and on a mesh that shares the state."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Self

import jax
from jax.sharding import (
    AbstractMesh,
    Mesh,
    NamedSharding,
    PartitionSpec,
    Sharding,
    SingleDeviceSharding,
)

from armillary.cluster._peers import Peers
from armillary.distribute._global_arrays import everywhere
from armillary.distribute._placement import Placement
from armillary.distribute.strategies._layouts import (
    Device,
    MeshLayout,
    ReplicaLayout,
    SingleLayout,
)
from armillary.distribute.strategies._rules import Rules
from armillary.state._lift import State
from armillary.xla._lowerings import Split


@dataclass(frozen=True)
class DevicePlacement(Placement):
    """All state and all batches on one device; `None` is JAX's default device."""

    layout: SingleLayout
    device: Device | None = None

    @classmethod
    def on(cls, device: Device | None) -> Self:
        """Returns the placement on a device."""
        sharding = None if device is None else SingleDeviceSharding(device)
        return cls(SingleLayout(sharding), device=device)

    @property
    def platform(self) -> str:
        if self.device is None:
            return jax.default_backend()
        return self.device.platform

    def state_shardings(self, state: State) -> Sequence[Sharding | None]:
        return [self.layout.sharding] * len(state.paths)


@dataclass(frozen=True)
class MeshPlacement(Placement):
    """State and batches on a mesh of devices of one kind.

    Attributes:
        described_platform: The kind of devices that are not present.
    """

    described_platform: str | None = None

    @property
    def platform(self) -> str:
        if self.described_platform is not None:
            return self.described_platform
        return self.mesh.devices.flat[0].platform  # The same for all of them.


@dataclass(frozen=True)
class ReplicaPlacement(MeshPlacement):
    """One replica on each device, which holds a copy of the state."""

    @classmethod
    def on(cls, mesh: Mesh, peers: Peers) -> Self:
        """Returns the placement on a mesh of the devices of some processes."""
        return cls(ReplicaLayout(mesh, peers), mesh)

    def state_shardings(self, state: State) -> Sequence[Sharding | None]:
        return [everywhere(self.mesh)] * len(state.paths)

    def abstract(self, num_devices: int, platform: str) -> Self:
        mesh = AbstractMesh(
            (num_devices,), self.mesh.axis_names, axis_types=self.mesh.axis_types
        )
        return replace(
            self,
            layout=ReplicaLayout(mesh, self.peers),
            mesh=mesh,
            described_platform=platform,
        )


@dataclass(frozen=True)
class ShardedPlacement(MeshPlacement):
    """State that rules split over a mesh, and batches split by examples.

    Attributes:
        rules: The rules for the arrays of a state.
        sizes: The sizes that a user has chosen for the axes; `None` for all devices
            along `fsdp`.
    """

    layout: MeshLayout
    rules: Rules = field(kw_only=True)
    sizes: tuple[int, ...] | None = field(kw_only=True)

    @property
    def split(self) -> Split:
        return self.layout.sharding_of

    def specs(self, state: State) -> list[PartitionSpec]:
        """Returns the division of each array of a state."""
        return self.rules.specs(state, self.mesh)

    def state_shardings(self, state: State) -> Sequence[NamedSharding]:
        return [NamedSharding(self.mesh, spec) for spec in self.specs(state)]

    def abstract(self, num_devices: int, platform: str) -> Self:
        # `fsdp` and `tensor` keep their sizes, and `data` grows.
        _, fsdp, tensor = self.sizes or (1, num_devices, 1)
        if num_devices % (fsdp * tensor):
            raise ValueError(
                f"There are {num_devices} devices to plan for, which `mesh_shape` does "
                f"not divide: it has {fsdp} along 'fsdp' and {tensor} along 'tensor'. "
                f"Choose sizes whose product divides {num_devices}."
            )
        sizes = (num_devices // (fsdp * tensor), fsdp, tensor)
        mesh = AbstractMesh(
            sizes, self.mesh.axis_names, axis_types=self.mesh.axis_types
        )
        return replace(
            self,
            layout=replace(self.layout, mesh=mesh),
            mesh=mesh,
            described_platform=platform,
        )
