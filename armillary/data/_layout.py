"""What data must know about a strategy: how many replicas, and where arrays go."""

from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeAlias

from armillary.typing import PyTree

Active: TypeAlias = int | tuple[int, ...]
"""Which replicas have data: so many, the first ones, or those of these numbers."""


class Boundary(Protocol):
    """What processes tell each other between two loops."""

    def take(self, say: Callable[[], Any]) -> list[Any] | None:
        """Returns, once, what each process said by the method `say`."""
        ...


class Peers(Protocol):
    """The processes that train together, where there are several."""

    @property
    def boundary(self) -> Boundary:
        """What they tell each other between two loops."""
        ...

    @property
    def index(self) -> int:
        """The number of this process."""
        ...

    @property
    def count(self) -> int:
        """How many there are."""
        ...

    def gather(self, topic: str, value: str) -> list[str]:
        """Returns the values of all processes; all must call it at the same points."""
        ...

    def announcing_errors(self) -> AbstractContextManager[None]:
        """Returns a context that sends its errors to the other processes."""
        ...


class BatchLayout(Protocol):
    """Puts host arrays where the replicas of this process expect them.

    Strategies implement it, so that nothing in this package knows a strategy.
    """

    @property
    def num_replicas(self) -> int:
        """Replicas that share a global batch, in all processes."""
        ...

    @property
    def local_replicas(self) -> range:
        """Those of them that this process feeds."""
        ...

    @property
    def peers(self) -> Peers | None:
        """The processes that the replicas are in; None if this is the only one."""
        ...

    @property
    def stacked(self) -> bool:
        """Whether leaves have a replica axis.

        If True, leaves have shape `(num_replicas, per_replica_batch, ...)`, of which a
        process gives the rows of its own replicas. If False, they have shape
        `(batch, ...)`, any batch size fits, and each process has all of it.
        """
        ...

    def place(
        self, arrays: PyTree, leading_axes: int = 0, num_replicas: int | None = None
    ) -> PyTree:
        """Returns host arrays as device arrays.

        It is called from background threads too.
        """
        ...

    @property
    def num_shares(self) -> int:
        """How many parts a batch has at most, each with its own devices."""
        ...

    def describe(self, types: PyTree, leading: tuple[int, ...] = ()) -> PyTree:
        """Returns the types of what `place` returns, with shardings."""
        ...

    @property
    def devices(self) -> Collection[Any]:
        """The devices of this process that the replicas run on."""
        ...

    def replicate(self, arrays: PyTree) -> PyTree:
        """Returns host arrays as device arrays that every replica has whole."""
        ...

    def gather(self, arrays: PyTree, rows: Any) -> PyTree:
        """Returns the rows of a batch, each replica's taken on its own device.

        It may be traced, and never waits for another device.
        """
        ...

    def wrap(self, arrays: PyTree, num_active: Active) -> PyTree:
        """Returns placed arrays as the values that a user's step receives."""
        ...


def hosted_replicas(local: range, num_devices: int, num_replicas: int) -> range:
    """Returns which of fewer replicas the devices `local` of all of them run.

    Each replica is on as many devices in a row: with 4 devices, devices 0 and 1 run the
    first of 2 replicas, and devices 2 and 3 the second.
    """
    num_copies = num_devices // num_replicas
    return range(local.start // num_copies, -(-local.stop // num_copies))
