"""How a step says where its own values lie, among the devices that share a model.

After the three methods of `tf.distribute.TPUStrategy`: there a replica has several
logical devices; here those are the devices along the axis `tensor` of a mesh. What they
say are sharding annotations, which XLA follows, and which change no number.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

AXIS = "tensor"


def split_over(
    mesh: Mesh | AbstractMesh, tensor: jax.Array, partition_dimensions: Sequence[int]
) -> jax.Array:
    """Returns an array of which each device along `tensor` has a part."""
    parts, count = list(partition_dimensions), mesh.shape[AXIS]
    split = [axis for axis, size in enumerate(parts) if size != 1]
    shape, problem = tensor.shape, None
    if len(parts) != len(shape):
        problem = f"the array has shape {shape}: give one number for each axis"
    elif math.prod(parts) != count or len(split) > 1:
        problem = (
            f"the mesh has {count} devices along 'tensor': split one axis in {count} "
            "parts, and give 1 for the others"
        )
    elif split and shape[split[0]] % count:
        problem = (
            f"axis {split[0]} of shape {shape} has no {count} equal parts: split "
            "another one"
        )
    if problem is not None:
        raise ValueError(f"`partition_dimensions` is {parts}, but {problem}.")
    entries: list[Any] = [PartitionSpec.UNCONSTRAINED] * len(parts)
    for axis in split:
        entries[axis] = AXIS
    sharding = NamedSharding(mesh, PartitionSpec(*entries))
    return jax.lax.with_sharding_constraint(tensor, sharding)
