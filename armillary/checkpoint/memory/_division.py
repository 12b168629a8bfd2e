"""Divides the arrays of a checkpoint among the processes, one owner for each part.

Copies of a part may lie on devices of several processes. One of them owns the part, so
that it is written once. All processes find the same owners without an exchange.
"""

import math
from collections.abc import Mapping
from typing import Any, TypeAlias

import jax
import numpy as np

from armillary.checkpoint._content import Content
from armillary.checkpoint._leaves import as_stored
from armillary.checkpoint.memory._share import Box, as_box
from armillary.cluster._peers import Peers
from armillary.distribute.replica._program_mesh import without_program_mesh

Parts: TypeAlias = Mapping[tuple[str, Box], jax.Array | np.ndarray]
"""Parts of arrays, by the name of the array and the place in it."""


def find_own_parts(content: Content, peers: Peers) -> Parts:
    """Returns the parts of arrays that this process owns, by name and box."""
    own: dict[tuple[str, Box], Any] = {}
    num_elements = [0] * peers.count
    with without_program_mesh():
        for name, leaf in content.leaves.items():
            if not content.specs[name].is_stored:
                continue
            owners: dict[Box, int] = {}
            if _is_divided(leaf):
                owners = _find_owners(leaf, num_elements)
            stored = as_stored(leaf, peers)
            if stored is None:
                continue
            for box, part in _find_parts(stored, owners, peers.index).items():
                own[name, box] = part

    if peers.index == 0:
        for name, array in content.state_arrays.items():
            own[name, _whole(array)] = array
    return own


def _is_divided(leaf: Any) -> bool:
    """Returns whether an array lies on several processes; all find the same answer."""
    if not isinstance(leaf, jax.Array):
        return False
    devices = leaf.sharding.device_set
    return len({device.process_index for device in devices}) > 1


def _find_owners(leaf: jax.Array, num_elements: list[int]) -> dict[Box, int]:
    """Returns the process that owns each part; `num_elements` counts what each owns."""
    holders: dict[Box, set[int]] = {}
    for device, index in leaf.sharding.devices_indices_map(leaf.shape).items():
        box = as_box(index, leaf.shape)
        holders.setdefault(box, set()).add(device.process_index)

    def rank(process: int) -> tuple[int, int]:
        return num_elements[process], process

    # The holder that owns the least, so that all processes write about as much.
    owners: dict[Box, int] = {}
    for box, processes in holders.items():
        owner = min(processes, key=rank)
        owners[box] = owner
        num_elements[owner] += math.prod(box.shape)
    return owners


def _find_parts(
    stored: jax.Array | np.ndarray, owners: Mapping[Box, int], index: int
) -> dict[Box, Any]:
    """Returns the parts of an array that a process owns."""
    if not isinstance(stored, jax.Array):
        return {_whole(stored): stored}
    parts: dict[Box, Any] = {}
    for shard in stored.addressable_shards:
        box = as_box(shard.index, stored.shape)
        if _find_owner(box, owners, index) == index:
            parts.setdefault(box, shard.data)
    return parts


def _find_owner(box: Box, owners: Mapping[Box, int], default: int) -> int:
    """Returns the owner of a part; a random key is stored with one more axis."""
    if not owners:
        return default
    if box in owners:
        return owners[box]
    return owners[Box(box.start[:-1], box.stop[:-1])]


def _whole(array: Any) -> Box:
    return Box((0,) * array.ndim, tuple(array.shape))
