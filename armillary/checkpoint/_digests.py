"""Digests of arrays: short texts that are equal if all values are equal.

A digest is a sum over the elements, in which each counts together with its position. So
it does not depend on the devices, the processes or the division of the array: each
device sums up its own part, and nothing is gathered or copied to the host. A change of
a single element always changes the digest. It finds mistakes, not attacks.
"""

import weakref
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding

from armillary.distribute._global_arrays import everywhere, is_key, is_on_host
from armillary.distribute.replica._program_mesh import without_program_mesh

# Two sums of 32 bits each, because JAX has no integers of 64 bits by default.
_SEEDS = (0x9E3779B9, 0x7F4A7C15)
_WORDS = {8: jnp.uint8, 16: jnp.uint16}


class Digests:
    """Computes the digest of each array once, as long as the program holds it."""

    def __init__(self) -> None:
        # An array is held weakly, because a strategy may replace it by parts.
        self._known: dict[str, tuple[weakref.ref[jax.Array], str]] = {}

    def find(self, leaves: Mapping[str, Any]) -> dict[str, str]:
        """Returns the digest of each array, by path.

        All processes must call it with the same arrays.
        """
        found: dict[str, str] = {}
        new: dict[str, Any] = {}
        for path, leaf in leaves.items():
            array, digest = self._known.get(path, (None, ""))
            if array is not None and array() is leaf:
                found[path] = digest
            else:
                new[path] = leaf

        for path, digest in compute_digests(new).items():
            found[path] = digest
            leaf = new[path]
            if isinstance(leaf, jax.Array):  # NumPy arrays may change in place.
                self._known[path] = (weakref.ref(leaf), digest)
        return found


def compute_digests(leaves: Mapping[str, Any]) -> dict[str, str]:
    """Returns the digest of each array, by path."""
    sums: dict[str, jax.Array] = {}
    with without_program_mesh():
        # All programs are started before the first result is awaited, except that only
        # one array of the host at a time has a copy on the devices.
        for path, leaf in leaves.items():
            sums[path] = _start(leaf)
            if is_on_host(leaf):
                jax.block_until_ready(sums[path])

    digests: dict[str, str] = {}
    for path, pair in sums.items():
        first, second = np.asarray(pair).tolist()
        digests[path] = f"{first:08x}{second:08x}"
    return digests


def _start(leaf: Any) -> jax.Array:
    """Starts the program for one array."""
    if is_key(leaf):
        leaf = jax.random.key_data(leaf)
    if not isinstance(leaf, jax.Array):
        # In the dtype that the array gets in a step.
        return _sum_up(jnp.asarray(leaf))
    if is_on_host(leaf):
        leaf = jax.device_put(leaf, leaf.sharding.with_memory_kind("device"))
    if leaf.is_fully_replicated and leaf.addressable_shards:
        return _sum_up(leaf.addressable_data(0))
    if leaf.is_fully_addressable:
        return _sum_up(leaf)

    # The sums of all processes, so that each of them has the same digest.
    assert isinstance(leaf.sharding, NamedSharding)
    result = everywhere(leaf.sharding.mesh)
    return jax.jit(_sum_up, out_shardings=result)(leaf)


@jax.jit
def _sum_up(array: jax.Array) -> jax.Array:
    """Returns two sums over all elements and their positions."""
    words = _as_words(array)
    positions = _number_elements(words.shape)
    mixed: list[jax.Array] = []
    for seed in _SEEDS:
        places = _mix(positions + np.uint32(seed))
        mixed.append(_mix(words ^ places))

    # In one reduction, because XLA writes the operands of two into memory first.
    zeros = [np.uint32(0)] * len(mixed)
    axes = tuple(range(words.ndim))
    sums = lax.reduce(mixed, zeros, _add, axes)
    return jnp.stack(sums)


def _number_elements(shape: tuple[int, ...]) -> jax.Array:
    """Returns the position of each element in the whole array, in row-major order."""
    position = jnp.zeros(shape, jnp.uint32)
    for axis, size in enumerate(shape):
        index = lax.broadcasted_iota(jnp.uint32, shape, axis)
        position = position * np.uint32(size) + index
    return position


def _add(a: list[jax.Array], b: list[jax.Array]) -> list[jax.Array]:
    return [first + second for first, second in zip(a, b, strict=True)]


def _as_words(array: jax.Array) -> jax.Array:
    """Returns the bits of an array as integers of at most 32 bits."""
    dtype = array.dtype
    if dtype == jnp.bool_:
        return array.astype(jnp.uint32)
    if jnp.issubdtype(dtype, jnp.complexfloating):
        return _as_words(jnp.stack([array.real, array.imag], axis=-1))

    is_float = jnp.issubdtype(dtype, jnp.floating)
    limits = jnp.finfo(dtype) if is_float else jnp.iinfo(dtype)
    bits = limits.bits
    if bits < 8:
        return _as_words(array.astype(jnp.float32))  # exact

    # A number of 64 bits becomes two words along a new axis.
    word = _WORDS.get(bits, jnp.uint32)
    return lax.bitcast_convert_type(array, word).astype(jnp.uint32)


def _mix(words: jax.Array) -> jax.Array:
    """Spreads each bit of a word over the whole word: the last steps of MurmurHash3.

    It has an inverse, so different words stay different.
    """
    words = (words ^ (words >> 16)) * np.uint32(0x85EBCA6B)
    words = (words ^ (words >> 13)) * np.uint32(0xC2B2AE35)
    return words ^ (words >> 16)
