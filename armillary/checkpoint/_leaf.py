"""The arrays of a checkpoint: how each is described, stored and put back.

Orbax stores plain arrays. A typed random key is stored as its data and the name of its
algorithm, and unsigned integers of less than a byte as bytes. An array goes back to
where the program's own array is: its sharding and memory kind, and whether it is bound
to its devices at all.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from armillary.distribute._global_arrays import as_global, as_whole, is_key


@dataclasses.dataclass(frozen=True)
class LeafSpec:
    """The properties that must agree between a checkpoint and a program.

    Attributes:
        dtype: Name of the dtype, such as `bfloat16`, or `key<threefry2x32>`.
        shape: The shape; without the axis of the data for a random key.
        is_host: Whether it is a NumPy array or number, which becomes an array of JAX's
            default width once a step has used it.
    """

    dtype: str
    shape: tuple[int, ...]
    is_host: bool = False

    def __str__(self) -> str:
        return f"{self.dtype} {self.shape}"

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to store."""
        return 0 in self.shape

    def matches(self, other: "LeafSpec") -> bool:
        """Returns whether a value of one can be restored as the other."""
        if self.shape != other.shape:
            return False
        if self.is_host or other.is_host:
            return _canonical(self.dtype) == _canonical(other.dtype)
        return self.dtype == other.dtype

    def as_json(self) -> dict[str, Any]:
        """Returns what `from_json` reads."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> "LeafSpec":
        """Returns the description that `as_json` wrote."""
        return cls(value["dtype"], tuple(value["shape"]), value["is_host"])


@dataclasses.dataclass(frozen=True)
class Content:
    """The values of a checkpoint at one moment.

    Attributes:
        leaves: The arrays by path, as the slots hold them.
        states: What each object's `get_state` returned, in the types of JSON.
        stored: The plain arrays to store for the leaves, if they were made already.
        evaluation: How far the evaluation of this moment is, for a controller.
    """

    leaves: dict[str, Any]
    states: dict[str, Any]
    stored: dict[str, Any] | None = None
    evaluation: Any = None

    @property
    def specs(self) -> dict[str, LeafSpec]:
        """The description of each leaf."""
        return {path: describe_leaf(leaf) for path, leaf in self.leaves.items()}


def describe_leaf(leaf: Any) -> LeafSpec:
    """Returns the description of an array or number."""
    if is_key(leaf):
        return LeafSpec(f"key<{jax.random.key_impl(leaf)}>", tuple(leaf.shape))
    if isinstance(leaf, jax.Array):
        return LeafSpec(leaf.dtype.name, tuple(leaf.shape))
    array = np.asarray(leaf)
    # Of JAX, because NumPy does not count `bfloat16` and the like among numbers.
    if not any(
        jax.dtypes.issubdtype(array.dtype, kind) for kind in (np.bool_, np.number)
    ):
        raise TypeError(f"{type(leaf).__name__} {leaf!r}")
    return LeafSpec(array.dtype.name, tuple(array.shape), is_host=True)


def _is_widened(leaf: Any) -> bool:
    """Returns whether a leaf is stored as bytes: TensorStore lacks its dtype."""
    return hasattr(leaf, "dtype") and leaf.dtype.name in ("uint2", "uint4")


def as_stored(leaf: Any) -> jax.Array | np.ndarray:
    """Returns the plain array to store for a leaf."""
    if is_key(leaf):
        leaf = jax.random.key_data(leaf)
    if _is_widened(leaf):
        leaf = leaf.astype(np.uint8)
    return leaf if isinstance(leaf, jax.Array) else np.array(leaf)


def as_stored_by_one(leaf: Any, *, is_writer: bool) -> np.ndarray | None:
    """Returns what `as_stored` does, in the memory of the process that writes.

    All processes must call it, since one of them has only a part of some arrays. Orbax
    refuses arrays of devices where only one of several processes writes.
    """
    whole = as_whole(as_stored(leaf))
    return np.array(whole) if is_writer else None


def stored_sharding(target: Any) -> jax.sharding.Sharding | None:
    """Returns where the stored array is read to, or `None` for host memory.

    An array that is not bound to its device is read to host memory first: binding it
    would forbid programs on other devices that could use it before.
    """
    if isinstance(target, jax.Array) and target.committed:
        return target.sharding if target.is_fully_addressable else None
    return None


def as_restored(stored: Any, target: Any) -> Any:
    """Returns a stored array as the kind of value that `target` is, in its place."""
    if _is_widened(target):
        stored = stored.astype(target.dtype)
    if isinstance(target, np.ndarray) and target.dtype == stored.dtype:
        return stored
    if not isinstance(target, jax.Array):
        return jnp.array(stored)
    if not target.committed:
        (device,) = target.devices()
        with jax.default_device(device):
            stored = jnp.array(stored)
    if is_key(target):
        data = jnp.asarray(stored)
        stored = jax.random.wrap_key_data(data, impl=jax.random.key_impl(target))
    if not target.is_fully_addressable:
        return as_global(stored, target.sharding)
    if target.committed and stored.sharding != target.sharding:
        stored = jax.device_put(stored, target.sharding)
    return stored


def _canonical(dtype: str) -> str:
    if dtype.startswith("key<"):
        return dtype
    return jax.dtypes.canonicalize_dtype(jnp.dtype(dtype)).name
