"""Arrays on the devices of several processes, made of what each process has.

`jax.device_put` compares values over the network first. Here nothing travels: state is
compared once, by fingerprint, and batches are each process's own.
"""

import hashlib
import json
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Sharding

from armillary._typing import PyTree
from armillary.cluster._peers import Peers
from armillary.errors import PeerError

_MOST_LISTED = 20


def replicate(leaf: Any, sharding: Sharding) -> jax.Array:
    """Returns an array, equal on all processes, as one that every device has whole.

    Args:
        leaf: A NumPy array, an array of this process, or one that is equal on all
            devices; random keys too.
        sharding: One that replicates, over devices of several processes.
    """
    if _is_key(leaf):
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
    if _is_key(leaf):
        data = np.array(jax.random.key_data(leaf))
        return jax.random.wrap_key_data(
            jax.numpy.asarray(data), impl=jax.random.key_impl(leaf)
        )
    return jax.numpy.asarray(np.array(leaf))


def check_equal(peers: Peers, paths: Sequence[str], leaves: Sequence[Any]) -> None:
    """Raises if values that must be equal on all processes are not.

    Args:
        peers: The processes.
        paths: Names of the values, for the message.
        leaves: The values, arrays of this process.

    Raises:
        PeerError: If they differ.
    """
    own = dict(zip(paths, map(_fingerprint, leaves), strict=True))
    all_prints = [json.loads(text) for text in peers.gather("state", json.dumps(own))]
    names = list(dict.fromkeys(name for prints in all_prints for name in prints))
    different = [
        name for name in names if len({prints.get(name) for prints in all_prints}) > 1
    ]
    if not different:
        return
    lines = [
        f"  {name}: "
        + ", ".join(
            f"process {index} has {prints.get(name, 'no such array')}"
            for index, prints in enumerate(all_prints)
        )
        for name in different[:_MOST_LISTED]
    ]
    if len(different) > _MOST_LISTED:
        lines.append(f"  and {len(different) - _MOST_LISTED} more")
    raise PeerError(
        f"{len(different)} of {len(names)} arrays of the state differ between "
        "processes, but each process must begin with the same values:\n"
        + "\n".join(lines)
        + "\nUse the same random seed on all processes (`nnx.Rngs(0)`), and take "
        "nothing into the state that depends on the process, such as the time."
    )


def _fingerprint(leaf: Any) -> str:
    if _is_key(leaf):
        leaf = jax.random.key_data(leaf)
    host = np.ascontiguousarray(leaf)
    digest = hashlib.blake2b(host.tobytes(), digest_size=6).hexdigest()
    return f"{host.dtype.name} {tuple(np.shape(leaf))} #{digest}"


def _is_key(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and jax.dtypes.issubdtype(
        leaf.dtype, jax.dtypes.prng_key
    )
