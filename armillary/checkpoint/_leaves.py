"""Turns leaves of a program into arrays that a checkpoint stores, and back.

A typed random key is stored as its data, and a dtype that TensorStore does not have is
stored as a wider one. A restored array gets the sharding and the memory kind of the
program's own array, and it is committed only if that array is.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from armillary.cluster._peers import ALONE, Peers
from armillary.distribute._global_arrays import as_global, is_key

# By a dtype that TensorStore does not have.
_WIDER = {"uint2": "uint8", "uint4": "uint8", "float8_e4m3": "float16"}


def as_stored(leaf: Any, peers: Peers = ALONE) -> jax.Array | np.ndarray | None:
    """Returns the plain array that this process stores for a leaf, if any.

    All processes must call it. If an array lies on devices of several processes, each
    of them stores a part. The first process stores all other leaves, which are equal in
    all processes.
    """
    if is_key(leaf):
        leaf = jax.random.key_data(leaf)
    wider = _find_wider(leaf)
    if wider is not None:
        leaf = leaf.astype(wider)
    if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
        return _as_part(leaf, peers)
    if not peers.is_alone:
        # Orbax refuses device arrays of one of several processes.
        return None if peers.index else np.array(leaf)
    if not isinstance(leaf, jax.Array):
        return np.array(leaf)

    is_on_cpu = all(device.platform == "cpu" for device in leaf.devices())
    if is_on_cpu and leaf.is_fully_replicated:
        # Replicas on CPUs share the host's memory. Orbax would compile programs to cut
        # the array into a slice for each device, which helps only if each device has a
        # memory of its own.
        return leaf.addressable_data(0)
    return leaf


def _as_part(leaf: jax.Array, peers: Peers) -> jax.Array | None:
    if leaf.addressable_shards:
        return leaf
    if peers.index:
        return None  # This process has no device of the array.
    raise ValueError(
        f"an array of shape {leaf.shape} lies on no device of process 0, which writes "
        "the description of all arrays. Place it on a mesh with devices of all "
        "processes"
    )


def stored_sharding(target: Any) -> jax.sharding.Sharding | None:
    """Returns the sharding for reading a stored array, or `None` for host memory."""
    # An uncommitted array must stay so, or programs on other devices could not use it.
    if isinstance(target, jax.Array) and target.committed:
        return target.sharding
    return None


def as_restored(stored: Any, target: Any) -> Any:
    """Returns a stored array as the same kind of value, on the devices of `target`."""
    if _find_wider(target) is not None:
        stored = stored.astype(target.dtype)
    if isinstance(target, np.ndarray) and target.dtype == stored.dtype:
        return stored
    if not isinstance(target, jax.Array):
        # JAX's integers have 32 bits, but integers of Python and NumPy may need more.
        is_array = isinstance(target, np.ndarray)
        return jnp.array(stored) if is_array else type(target)(stored.item())

    if not target.committed:
        (device,) = target.sharding.device_set  # known of a deleted array, too
        with jax.default_device(device):
            stored = jnp.array(stored)
    if is_key(target):
        data = jnp.asarray(stored)
        stored = jax.random.wrap_key_data(data, impl=jax.random.key_impl(target))
    if not target.committed or stored.sharding == target.sharding:
        return stored
    if not target.is_fully_addressable:
        return as_global(stored, target.sharding)
    return jax.device_put(stored, target.sharding)


def _find_wider(leaf: Any) -> str | None:
    """Returns the dtype that stores a leaf exactly, if TensorStore lacks its own."""
    return _WIDER.get(leaf.dtype.name) if hasattr(leaf, "dtype") else None
