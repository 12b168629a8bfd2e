"""Arrays on the devices of several processes, made of what each process has.

`jax.device_put` compares values over the network first. Here nothing travels: state is
compared once, by fingerprint, and batches are each process's own.
"""

from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec, Sharding

from armillary.typing import PyTree


def everywhere(mesh: Mesh | AbstractMesh) -> NamedSharding:
    """Returns where an array lies of which each device of a mesh has a copy."""
    return NamedSharding(mesh, PartitionSpec())


def replicate(leaf: Any, sharding: Sharding) -> jax.Array:
    """Returns an array, equal on all processes, as one that every device has whole.

    Args:
        leaf: A NumPy array, an array of this process, or one that is equal on all
            devices; random keys too.
        sharding: One that replicates, over devices of several processes.
    """
    if is_key(leaf):
        data = replicate(jax.random.key_data(leaf), sharding)
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(leaf))
    host = np.asarray(leaf)
    # Devices must not share memory with `leaf`, which its owner may donate.
    return jax.make_array_from_callback(host.shape, sharding, lambda _: np.array(host))


def split(
    arrays: PyTree, sharding: Sharding, axis: int, rows: range, num_rows: int
) -> PyTree:
    """Returns arrays of which this process has some rows, as arrays with all of them.

    Args:
        arrays: Pytree of NumPy arrays.
        sharding: One that splits `axis` over devices, one row on each.
        axis: The axis of the replicas.
        rows: Which rows the arrays hold.
        num_rows: How many rows there are in all processes.
    """

    def place(leaf: Any) -> jax.Array:
        host = np.asarray(leaf)
        shape = (*host.shape[:axis], num_rows, *host.shape[axis + 1 :])

        def read(index: Any) -> np.ndarray:
            start = (index[axis].start or 0) - rows.start
            own = slice(start, start + 1)
            return host[(*index[:axis], own, *index[axis + 1 :])]

        return jax.make_array_from_callback(shape, sharding, read)

    return jax.tree.map(place, arrays)


def as_local(leaf: Any) -> Any:
    """Returns an array that is equal on all devices as one of this process alone."""
    if not isinstance(leaf, jax.Array) or leaf.is_fully_addressable:
        return leaf
    if is_key(leaf):
        data = np.array(jax.random.key_data(leaf))
        return jax.random.wrap_key_data(
            jax.numpy.asarray(data), impl=jax.random.key_impl(leaf)
        )
    return jax.numpy.asarray(np.array(leaf))


def is_array(leaf: Any) -> bool:
    """Returns whether `leaf` is an array of JAX or NumPy, or a scalar of NumPy."""
    return isinstance(leaf, jax.Array | np.ndarray | np.generic)


def is_key(leaf: Any) -> bool:
    """Returns whether `leaf` is a typed random key."""
    return isinstance(leaf, jax.Array) and jax.dtypes.issubdtype(
        leaf.dtype, jax.dtypes.prng_key
    )
