"""Values that differ between replicas, seen from outside `Strategy.run`.

A `PerReplica` is one global array with the replica as its first axis, spread over the
devices. Batches from a distributed dataset and results of `run` have this form;
`Strategy.reduce`, `gather` and `local_results` take it apart.
"""

import enum
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin

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


def _refuse(use: str) -> Callable[..., NoReturn]:
    """Returns a method that says what to do instead of using a value as one array."""

    def method(self: "PerReplica", *_: Any, **__: Any) -> NoReturn:
        raise TypeError(self._explain(use))

    return method


@jax.tree_util.register_pytree_node_class
class PerReplica(NDArrayOperatorsMixin):
    """One value per replica.

    It is no array: what arrays can do is an error that says so.

    Attributes:
        array: The values in one array of shape `(num_replicas, ...)`, or the value that
            all replicas share.
        num_active: How many replicas hold a value. It is the number of replicas except
            for the leftovers of a complete evaluation, where the other rows of
            `stacked` mean nothing.
        active_replicas: Which ones: so many from the first, or those of these numbers.
        shared_by: How many replicas share one value; `None` if each has its own.
    """

    def __init__(
        self, array: Any, num_active: Active, shared_by: int | None = None
    ) -> None:
        self.array = array
        self.num_active = count_active(num_active)
        self.active_replicas = num_active
        self.shared_by = shared_by

    @property
    def is_shared(self) -> bool:
        """Whether the values are known to be equal, as gradients are."""
        return self.shared_by is not None

    @property
    def stacked(self) -> Any:
        """The values in one array of shape `(num_replicas, ...)`."""
        if self.shared_by is None:
            return self.array
        return jnp.broadcast_to(self.array, (self.shared_by, *jnp.shape(self.array)))

    @property
    def values(self) -> tuple[jax.Array, ...]:
        """The value of each replica that holds one."""
        stacked = self.stacked
        return tuple(stacked[i] for i in list_active(self.active_replicas))

    @property
    def active(self) -> jax.Array:
        """The rows of `stacked` that mean something."""
        stacked = self.stacked
        if self.num_active == stacked.shape[0]:
            return stacked
        if isinstance(self.active_replicas, tuple):
            return stacked[np.array(self.active_replicas)]
        return stacked[: self.num_active]

    def holds(self, replica: int) -> bool:
        """Returns whether a replica holds a value."""
        return replica in list_active(self.active_replicas)

    def __repr__(self) -> str:
        shape = getattr(self.array, "shape", None)
        own = slice(None) if self.is_shared else slice(1, None)
        inside = "?" if shape is None else f"{self.array.dtype}{list(shape[own])}"
        return f"PerReplica({self.num_active} x {inside})"

    def _explain(self, use: str) -> str:
        return (
            f"{self!r} {use}, but it holds one part for each of {self.num_active} "
            "replicas. Put the code into a function, and call that with "
            "`strategy.run(step_fn, args=(batch,))`, or combine the parts first: "
            "`strategy.reduce(ReduceOp.SUM, value)`, `strategy.gather(value, axis=0)`."
        )

    __jax_array__ = __array__ = _refuse("was used as one array")
    __getitem__ = _refuse("was indexed")
    __iter__ = _refuse("was iterated over")
    __len__ = _refuse("was asked for its length")
    __float__ = __int__ = _refuse("was converted to a number")
    __bool__ = _refuse("was used as a condition")

    def __array_ufunc__(self, function: np.ufunc, *_: Any, **__: Any) -> NoReturn:
        """Says what to do instead of arithmetic; all operators lead here.

        Raises:
            TypeError: Always.
        """
        raise TypeError(self._explain(f"was used in `{function.__name__}`"))

    # Programs look values up by identity, as they do with any object that is no array.
    def __eq__(self, other: object) -> bool:
        return self is other

    def __ne__(self, other: object) -> bool:
        return self is not other

    def __hash__(self) -> int:
        return id(self)

    def __getattr__(self, name: str) -> Any:
        # What is asked for by protocol, such as `__array_interface__`, is just missing.
        if name.startswith("_") or not hasattr(jax.Array, name):
            raise AttributeError(f"PerReplica has no attribute {name!r}")
        raise AttributeError(self._explain(f"was asked for `{name}`"))

    def tree_flatten(self) -> tuple[tuple[Any], tuple[Active, int | None]]:
        """Flattens into the array."""
        return (self.array,), (self.active_replicas, self.shared_by)

    @classmethod
    def tree_unflatten(
        cls, attributes: tuple[Active, int | None], children: tuple[Any]
    ) -> "PerReplica":
        """Builds a value from the array."""
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
