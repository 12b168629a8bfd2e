"""What data needs to know of a strategy: how many replicas, and where arrays go."""

from typing import Protocol

from armillary._typing import PyTree


class BatchLayout(Protocol):
    """Puts host arrays where the replicas of this process expect them.

    Strategies implement it, so that nothing in this package knows a strategy.
    """

    @property
    def num_replicas(self) -> int:
        """Replicas that this process feeds."""
        ...

    @property
    def stacked(self) -> bool:
        """Whether leaves have a replica axis.

        If True, leaves have shape `(num_replicas, per_replica_batch, ...)`. If False,
        they have shape `(batch, ...)` and any batch size fits.
        """
        ...

    def place(self, arrays: PyTree, leading_axes: int = 0) -> PyTree:
        """Returns host arrays as device arrays.

        It is called from background threads too.

        Args:
            arrays: Pytree of NumPy arrays. Nobody writes to them afterwards, so the
                result may share their memory.
            leading_axes: Axes before those of a batch: 0 for one batch, 1 for a chunk.
        """
        ...

    def wrap(self, arrays: PyTree, num_active: int) -> PyTree:
        """Returns placed arrays as the values that a user's step receives.

        Args:
            arrays: What `place` returned.
            num_active: Replicas that have data, the first ones. The rows of the others
                are copies and must have no effect.
        """
        ...
