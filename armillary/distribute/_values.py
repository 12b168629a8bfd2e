"""Values that differ between replicas, seen from outside `Strategy.run`.

A `PerReplica` is one global array with the replica as its first axis, spread over the
devices. Batches from a distributed dataset and results of `run` have this form;
`Strategy.reduce`, `gather` and `local_results` take it apart.
"""

import enum
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from armillary.data import Active


class ReduceOp(enum.Enum):
    """How values are combined over replicas (`tf.distribute.ReduceOp`)."""

    SUM = "SUM"
    MEAN = "MEAN"

    @classmethod
    def of(cls, value: Any) -> "ReduceOp":
        """Returns `value` as a member; the names may be given as strings.

        Raises:
            ValueError: If `value` names no member.
        """
        if isinstance(value, cls):
            return value
        try:
            return cls[str(value).upper()]
        except KeyError:
            raise ValueError(
                f"`reduce_op` is {value!r}, but it must be `ReduceOp.SUM` or "
                "`ReduceOp.MEAN`. Use one of these, or their names as strings."
            ) from None


@jax.tree_util.register_pytree_node_class
class PerReplica:
    """One value per replica.

    Attributes:
        stacked: The values in one array of shape `(num_replicas, ...)`.
        num_active: How many replicas hold a value. It is the number of replicas except
            for the leftovers of a complete evaluation, where the other rows of
            `stacked` mean nothing.
        active_replicas: Which ones: so many from the first, or those of these numbers.
        is_shared: Whether the values are known to be equal, as gradients are.
    """

    def __init__(
        self, stacked: Any, num_active: Active, is_shared: bool = False
    ) -> None:
        self.stacked = stacked
        self.num_active = count_active(num_active)
        self.active_replicas = num_active
        self.is_shared = is_shared

    @property
    def values(self) -> tuple[jax.Array, ...]:
        """The value of each replica that holds one."""
        return tuple(self.stacked[i] for i in list_active(self.active_replicas))

    @property
    def active(self) -> jax.Array:
        """The rows of `stacked` that mean something."""
        if self.num_active == self.stacked.shape[0]:
            return self.stacked
        if isinstance(self.active_replicas, tuple):
            return self.stacked[np.array(self.active_replicas)]
        return self.stacked[: self.num_active]

    def holds(self, replica: int) -> bool:
        """Returns whether a replica holds a value."""
        return replica in list_active(self.active_replicas)

    def __repr__(self) -> str:
        shape = getattr(self.stacked, "shape", None)
        inside = "?" if shape is None else f"{self.stacked.dtype}{list(shape[1:])}"
        return f"PerReplica({self.num_active} x {inside})"

    def __jax_array__(self) -> Any:
        """Says what to do instead of using the value as one array.

        Raises:
            TypeError: Always.
        """
        raise TypeError(
            f"{self!r} was used as one array, but it holds one for each of "
            f"{self.num_active} replicas. Use it inside the function given to "
            "`strategy.run(fn, args=(value,))`, or combine it first: "
            "`strategy.reduce(ReduceOp.SUM, value)`, `strategy.gather(value, axis=0)`."
        )

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name not in (
            "shape",
            "dtype",
            "ndim",
            "sum",
            "mean",
        ):
            raise AttributeError(f"PerReplica has no attribute {name!r}")
        raise AttributeError(
            f"`{name}` was asked of a PerReplica, which holds one value for each of "
            f"{self.num_active} replicas. Use it inside the function given to "
            "`strategy.run`, or reduce it first: "
            "`strategy.reduce(ReduceOp.SUM, value)`."
        )

    def tree_flatten(self) -> tuple[tuple[Any], tuple[Active, bool]]:
        """Flattens into the stacked array."""
        return (self.stacked,), (self.active_replicas, self.is_shared)

    @classmethod
    def tree_unflatten(
        cls, attributes: tuple[Active, bool], children: tuple[Any]
    ) -> "PerReplica":
        """Builds a value from the stacked array."""
        return cls(children[0], *attributes)


def count_active(active: Active) -> int:
    """Returns how many replicas have data."""
    return active if isinstance(active, int) else len(active)


def list_active(active: Active) -> Sequence[int]:
    """Returns the numbers of the replicas that have data."""
    return range(active) if isinstance(active, int) else active


def is_per_replica(value: Any) -> bool:
    """Returns whether `value` is a `PerReplica`, for use as `is_leaf`."""
    return isinstance(value, PerReplica)
