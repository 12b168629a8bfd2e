"""Finds copies of mirrored state that are no longer equal.

Replicas compute the same update from the same sum, so their copies stay equal without
ever being compared. A bit that flips in one device's memory, or a device that computes
wrongly, stays unnoticed. Here each device sums up its own copies, and only the sums
travel.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from armillary._checks import list_lines
from armillary.distribute._dispatch import Dispatch
from armillary.distribute._global_arrays import everywhere
from armillary.distribute.program._decisions import has_copies
from armillary.distribute.replica._values import AXIS_NAME
from armillary.errors import ReplicaDivergenceError


class ReplicaComparison:
    """Compares the copies that the replicas of a mesh hold of some arrays."""

    def __init__(self, mesh: Mesh | None, dispatch: Dispatch) -> None:
        self._mesh, self._dispatch = mesh, dispatch
        self._compiled = None
        if mesh is not None and has_copies(mesh):
            rows = jax.shard_map(
                _checksums,
                mesh=mesh,
                in_specs=PartitionSpec(),
                out_specs=PartitionSpec(AXIS_NAME),
                # That copies are equal is what is to be found out.
                check_vma=False,
            )
            self._compiled = jax.jit(rows, out_shardings=everywhere(mesh))

    def start(self, arrays: Sequence[jax.Array]) -> jax.Array | None:
        """Starts to sum up each replica's copies of `arrays`; does not wait."""
        if self._compiled is None or not arrays:
            return None
        self._dispatch.wait()
        sums = self._compiled(list(arrays))
        self._dispatch.started(sums)
        return sums


def check_equal(sums: np.ndarray, paths: Sequence[str], when: str) -> None:
    """Raises if replicas hold different values, by what `ReplicaComparison` summed."""
    differing = {
        path: _minority(column.tolist())
        for path, column in zip(paths, sums.T, strict=True)
        if (column != column[0]).any()
    }
    if not differing:
        return
    count = len(sums)
    shown = list_lines(_describe(path, differing[path], count) for path in differing)
    raise ReplicaDivergenceError(
        f"{len(differing)} of {len(paths)} arrays of the state must be equal on all "
        f"{count} replicas, but {when} they are not:\n{shown}\n"
        "A device changed its copy on its own: its memory or arithmetic is at fault, "
        "or code outside the step assigned an array whose copies differ. Restore a "
        "checkpoint from before (`controller.restore_checkpoint(path)`), and leave a "
        "device out that does it again.",
        leaves=differing,
    )


def _checksums(arrays: Sequence[Any]) -> Any:
    return jnp.stack([_checksum(array) for array in arrays])[None]


def _checksum(array: Any) -> Any:
    """Returns a sum that differs for sure if one value does.

    Each value goes through a one-to-one function that also depends on its place, so
    that values which swap places or change together hardly ever keep the sum.
    """
    bits = _as_words(array)
    place = jax.lax.iota(jnp.uint32, bits.size)
    mixed = (bits ^ (place * np.uint32(0x85EBCA6B))) * np.uint32(0x9E3779B1)
    mixed = (mixed ^ (mixed >> np.uint32(15))) * np.uint32(0xC2B2AE35)
    return jnp.sum(mixed ^ (mixed >> np.uint32(13)), dtype=jnp.uint32)


def _as_words(array: Any) -> Any:
    """Returns the bits of an array as a flat array of 32-bit words."""
    if jax.dtypes.issubdtype(array.dtype, jax.dtypes.prng_key):
        array = jax.random.key_data(array)
    if jnp.issubdtype(array.dtype, jnp.complexfloating):
        array = jnp.stack([array.real, array.imag])
    size = array.dtype.itemsize
    if size < 4 and not jnp.issubdtype(array.dtype, jnp.floating):
        return array.astype(jnp.uint32).reshape(-1)
    if size >= 4:  # 64 bits become two words
        return jax.lax.bitcast_convert_type(array, jnp.uint32).reshape(-1)
    narrow = jnp.uint8 if size == 1 else jnp.uint16
    bits = jax.lax.bitcast_convert_type(array, narrow)
    return bits.astype(jnp.uint32).reshape(-1)


def _minority(column: list[int]) -> tuple[int, ...]:
    """Returns the replicas that differ from most others, or all without a majority."""
    value, count = Counter(column).most_common(1)[0]
    if 2 * count <= len(column):
        return tuple(range(len(column)))
    return tuple(i for i, other in enumerate(column) if other != value)


def _describe(path: str, replicas: tuple[int, ...], count: int) -> str:
    if len(replicas) == count:
        return f"{path}: no majority of replicas agrees"
    shown = ", ".join(map(str, replicas))
    return f"{path}: replica{'s' if len(replicas) > 1 else ''} {shown}"
