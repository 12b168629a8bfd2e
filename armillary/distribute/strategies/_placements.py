"""Placements on one device, on replicas, and on a mesh that shares the state."""

import math
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

from armillary.cluster._peers import ALONE, Peers
from armillary.distribute._global_arrays import everywhere
from armillary.distribute._placement import Place, Placement
from armillary.distribute.strategies._layouts import (
    Device,
    MeshLayout,
    ReplicaLayout,
    SingleLayout,
)
from armillary.distribute.strategies._rules import Rules, axes_of
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

    def state_shardings(
        self, state: State, *, is_whole: bool = True
    ) -> Sequence[Sharding | None]:
        del is_whole
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

    @property
    def replica_mesh(self) -> Mesh | AbstractMesh:
        return self.mesh

    def state_shardings(
        self, state: State, *, is_whole: bool = True
    ) -> Sequence[Sharding | None]:
        del is_whole
        return [everywhere(self.mesh)] * len(state.paths)

    def abstract(self, num_devices: int, platform: str) -> Self:
        mesh = AbstractMesh(
            (num_devices,), self.mesh.axis_names, axis_types=self.mesh.axis_types
        )
        return replace(
            self,
            layout=ReplicaLayout(mesh, ALONE),
            mesh=mesh,
            described_platform=platform,
        )


@dataclass(frozen=True)
class ShardedPlacement(MeshPlacement):
    """State that rules split over a mesh, and batches split by examples.

    Attributes:
        rules: The rules for the arrays of a state.
        growing_axis: The axis that gets more devices in a plan for more devices.
    """

    layout: MeshLayout
    rules: Rules = field(kw_only=True)
    growing_axis: str = field(kw_only=True)

    @property
    def split(self) -> Split:
        return self.layout.sharding_of

    def specs(self, state: State, *, is_whole: bool = True) -> list[PartitionSpec]:
        """Returns the division of each array of a state."""
        return self.rules.specs(state, self.mesh, is_whole=is_whole)

    def state_shardings(
        self, state: State, *, is_whole: bool = True
    ) -> Sequence[NamedSharding]:
        specs = self.specs(state, is_whole=is_whole)
        return [NamedSharding(self.mesh, spec) for spec in specs]

    def decide(self, state: State) -> Sequence[Place]:
        places: list[Place] = []
        for spec, reason in self.rules.decide(state, self.mesh):
            num_parts = 1
            for entry in spec:
                for axis in axes_of(entry):
                    num_parts *= self.mesh.shape[axis]
            places.append(Place(spec, num_parts, reason))
        return places

    def abstract(self, num_devices: int, platform: str) -> Self:
        kept = dict(self.mesh.shape)
        del kept[self.growing_axis]
        product = math.prod(kept.values())
        if num_devices % product:
            shown = " and ".join(
                f"{size} along {name!r}" for name, size in kept.items() if size > 1
            )
            raise ValueError(
                f"There are {num_devices} devices to plan for, which `mesh` does not "
                f"divide: it has {shown}. Choose sizes whose product divides "
                f"{num_devices}."
            )
        grown_size = num_devices // product
        sizes = {**self.mesh.shape, self.growing_axis: grown_size}
        mesh = AbstractMesh(
            tuple(sizes.values()), self.mesh.axis_names, axis_types=self.mesh.axis_types
        )
        return replace(
            self,
            layout=replace(self.layout, mesh=mesh, peers=ALONE),
            mesh=mesh,
            described_platform=platform,
        )
