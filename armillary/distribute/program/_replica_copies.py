"""Compares the copies of arrays that must be equal on all replicas.

If a bit flips in one copy of the state, only checksums of the copies show it.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from armillary._checks import list_lines
from armillary.distribute._dispatch import Dispatch
from armillary.distribute._global_arrays import everywhere, is_key
from armillary.errors import ReplicaDivergenceError


def largest_on_replicas(
    mesh: Mesh | None, fn: Callable[[Sequence[Any]], Any], arrays: Sequence[Any]
) -> Any:
    """Returns the largest `fn(arrays)` of all replicas, on all replicas.

    `mesh` has the axis of replicas. `None` stands for a single replica.
    """
    if mesh is None or mesh.size == 1:
        return fn(arrays)

    (axis,) = mesh.axis_names

    def largest(arrays: Sequence[Any]) -> Any:
        return jax.lax.pmax(fn(arrays), axis)

    mapped = jax.shard_map(
        largest,
        mesh=mesh,
        in_specs=PartitionSpec(),
        out_specs=PartitionSpec(),
        check_vma=False,
    )
    return mapped(list(arrays))


class ReplicaComparison:
    """Compares the copies that the replicas of a mesh hold of some arrays.

    The mesh has the axis of replicas. `None` stands for a single replica.
    """

    def __init__(self, mesh: Mesh | None, dispatch: Dispatch) -> None:
        self._dispatch = dispatch
        self._compiled = None
        if mesh is not None and mesh.size > 1:
            (axis,) = mesh.axis_names
            rows = jax.shard_map(
                _checksums_of_replica,
                mesh=mesh,
                in_specs=PartitionSpec(),
                out_specs=PartitionSpec(axis),
                # JAX must not assume that the copies are equal.
                check_vma=False,
            )
            self._compiled = jax.jit(rows, out_shardings=everywhere(mesh))

    def start(self, arrays: Sequence[jax.Array]) -> jax.Array | None:
        """Starts to compute checksums of each replica's copies, without waiting."""
        if self._compiled is None or not arrays:
            return None
        self._dispatch.wait()
        sums = self._compiled(list(arrays))
        self._dispatch.started(sums)
        return sums


def check_copies(sums: np.ndarray, paths: Sequence[str], when: str) -> None:
    """Raises if the checksums of a `ReplicaComparison` differ between replicas."""
    count = len(sums)
    differing: dict[str, tuple[int, ...]] = {}
    lines: list[str] = []
    for path, column in zip(paths, sums.T, strict=True):
        is_equal = (column == column[0]).all()
        if is_equal:
            continue
        replicas = _minority(column.tolist())
        differing[path] = replicas
        shown = "no majority of replicas agrees"
        if len(replicas) < count:
            noun = "replicas" if len(replicas) > 1 else "replica"
            numbers = ", ".join(map(str, replicas))
            shown = f"{noun} {numbers}"
        lines.append(f"{path}: {shown}")
    if not differing:
        return

    raise ReplicaDivergenceError(
        f"{len(differing)} of {len(paths)} arrays of the state must be equal on all "
        f"{count} replicas, but {when} they are not:\n{list_lines(lines)}\n"
        "Either the memory or the arithmetic of a device is faulty, or code outside "
        "the step assigned an array whose copies differ. Restore an earlier checkpoint "
        "(`controller.restore_checkpoint(path)`). If it happens again on the same "
        "device, do not use that device.",
        leaves=differing,
    )


def _minority(column: list[int]) -> tuple[int, ...]:
    """Returns the replicas that differ from most others, or all without a majority."""
    num_replicas = len(column)
    ((value, count),) = Counter(column).most_common(1)
    has_majority = 2 * count > num_replicas
    if not has_majority:
        return tuple(range(num_replicas))
    return tuple(i for i, other in enumerate(column) if other != value)


def _checksums_of_replica(arrays: Sequence[Any]) -> Any:
    sums = [_checksum(array) for array in arrays]
    return jnp.stack(sums)[None]


def _checksum(array: Any) -> Any:
    """Returns a checksum of values and their places; any changed value changes it."""
    # The constants of MurmurHash3 and xxHash spread each bit over the whole word. The
    # sum is of integers, so it does not depend on the order.
    bits = _as_words(array)
    place = jax.lax.iota(jnp.uint32, bits.size)
    mixed = (bits ^ (place * np.uint32(0x85EBCA6B))) * np.uint32(0x9E3779B1)
    mixed = (mixed ^ (mixed >> np.uint32(15))) * np.uint32(0xC2B2AE35)
    return jnp.sum(mixed ^ (mixed >> np.uint32(13)), dtype=jnp.uint32)


def _as_words(array: Any) -> Any:
    """Returns the bits of an array as one row of words of 32 bits."""
    if is_key(array):
        array = jax.random.key_data(array)
    if jnp.issubdtype(array.dtype, jnp.complexfloating):
        array = jnp.stack([array.real, array.imag])
    size = array.dtype.itemsize
    if size >= 4:  # 64 bits become two words
        return jax.lax.bitcast_convert_type(array, jnp.uint32).reshape(-1)
    if jnp.issubdtype(array.dtype, jnp.floating):
        narrow = jnp.uint8 if size == 1 else jnp.uint16
        array = jax.lax.bitcast_convert_type(array, narrow)
    return array.astype(jnp.uint32).reshape(-1)
