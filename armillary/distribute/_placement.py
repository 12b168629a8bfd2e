"""The place of state and batches: a value that every strategy has.

A strategy decides how a step runs. Its placement says on which devices that happens. To
plan for devices that are not present, a strategy gets another placement for a while.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self

from jax.sharding import PartitionSpec, Sharding

from armillary.cluster._peers import Peers
from armillary.data._layout import BatchLayout
from armillary.state._lift import State
from armillary.xla._lowerings import Split


class Place(NamedTuple):
    """The place of one array, and the rule that decided it.

    Attributes:
        spec: The axes of the mesh along each axis of the array.
        num_parts: The number of different parts; 1 for an array that is not divided.
        reason: The cause in words, such as `"annotation ('embed', 'mlp')"`.
    """

    spec: PartitionSpec
    num_parts: int
    reason: str


@dataclass(frozen=True)
class Placement:
    """The devices of a strategy, and the place of state and batches on them.

    Attributes:
        layout: The place of the batches of a distributed dataset.
        mesh: The devices, a `Mesh` or an `AbstractMesh`; `None` for a single device.
        home: The place of state between programs; `None` if programs leave it in place.
        dcn: The number of groups of devices along each axis that has slow links.
    """

    layout: BatchLayout
    mesh: Any = None
    home: Sharding | None = None
    dcn: Mapping[str, int] = field(default_factory=dict, kw_only=True)

    @property
    def platform(self) -> str:
        """The kind of the devices, such as `"cpu"`."""
        raise NotImplementedError

    @property
    def num_replicas(self) -> int:
        """The number of copies of a step that run together."""
        return self.layout.num_replicas

    @property
    def replica_mesh(self) -> Any:
        """The mesh whose only axis is the axis of replicas; `None` without one.

        If XLA divides one replica over the devices, the mesh has other axes.
        """
        return None

    @property
    def peers(self) -> Peers:
        """The processes that share the devices."""
        return self.layout.peers

    @property
    def split(self) -> Split | None:
        """The division of examples, if XLA divides a step between devices itself."""
        return None

    @property
    def reason(self) -> str:
        """The place of each array in words, if none of them is divided."""
        if self.home is not None:
            (device,) = self.home.device_set
            return f"on {device.platform}:{device.id} between programs"
        return "on the only device" if self.mesh is None else "a copy on each device"

    def state_shardings(
        self, state: State, *, is_whole: bool = True
    ) -> Sequence[Sharding | None]:
        """Returns the sharding of each array in programs; `None` for any device.

        `is_whole` is false for a part of the state of a step, such as a model alone.
        """
        raise NotImplementedError

    def decide(self, state: State) -> Sequence[Place]:
        """Returns the place of each array, in the order of the paths of a state."""
        return [Place(PartitionSpec(), 1, self.reason)] * len(state.paths)

    def abstract(self, num_devices: int, platform: str) -> Self:
        """Returns the same placement on devices that are not present.

        Args:
            num_devices: The number of devices.
            platform: Their kind, such as `"tpu"`.

        Raises:
            ValueError: If the devices cannot form such a mesh.
        """
        raise NotImplementedError
