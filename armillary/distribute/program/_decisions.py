"""Decisions that must be the same on all replicas, though each sees its own copy.

Mirrored state is equal everywhere as long as the hardware is right. A decision that
each replica took from its own copy would make a wrong bit on one of them take it
another way than the others, and all would wait for ever at the next sum.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import Mesh, PartitionSpec

from armillary.distribute.replica._values import AXIS_NAME


def largest_on_replicas(
    mesh: Mesh | None, fn: Callable[[Sequence[Any]], Any], arrays: Sequence[Any]
) -> Any:
    """Returns `fn(arrays)`, the largest of what it is on any replica."""
    if not has_copies(mesh):
        return fn(arrays)

    def on_replica(arrays: Sequence[Any]) -> Any:
        return jax.lax.pmax(fn(arrays), AXIS_NAME)

    everywhere = PartitionSpec()
    mapped = jax.shard_map(
        on_replica,
        mesh=mesh,
        in_specs=everywhere,
        out_specs=everywhere,
        check_vma=False,
    )
    return mapped(list(arrays))


def has_copies(mesh: Mesh | None) -> bool:
    """Returns whether several devices of a mesh hold a copy of mirrored state."""
    return mesh is not None and mesh.shape.get(AXIS_NAME, 1) > 1
