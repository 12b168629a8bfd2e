"""The place of state and batches: a value that every strategy has.

A strategy decides how a step runs. Its placement says on which devices that happens. To
plan for devices that are not present, a strategy gets another placement for a while.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

from jax.sharding import Sharding

from armillary.cluster._peers import Peers
from armillary.data._layout import BatchLayout
from armillary.state._lift import State
from armillary.xla._lowerings import Split


@dataclass(frozen=True)
class Placement:
    """The devices of a strategy, and the place of state and batches on them.

    Attributes:
        layout: The place of the batches of a distributed dataset.
        mesh: The devices, a `Mesh` or an `AbstractMesh`; `None` for a single device.
        home: The place of state between programs; `None` if programs leave it in place.
    """

    layout: BatchLayout
    mesh: Any = None
    home: Sharding | None = None

    @property
    def platform(self) -> str:
        """The kind of the devices, such as `"cpu"`."""
        raise NotImplementedError

    @property
    def num_replicas(self) -> int:
        """The number of copies of a step that run together."""
        return self.layout.num_replicas

    @property
    def peers(self) -> Peers:
        """The processes that share the devices."""
        return self.layout.peers

    @property
    def split(self) -> Split | None:
        """The division of examples, if XLA divides a step between devices itself."""
        return None

    def state_shardings(self, state: State) -> Sequence[Sharding | None]:
        """Returns the sharding of each array in programs; `None` for any device."""
        raise NotImplementedError

    def abstract(self, num_devices: int, platform: str) -> Self:
        """Returns the same placement on devices that are not present.

        Args:
            num_devices: The number of devices.
            platform: Their kind, such as `"tpu"`.

        Raises:
            ValueError: If the devices cannot form such a mesh.
        """
        raise NotImplementedError
