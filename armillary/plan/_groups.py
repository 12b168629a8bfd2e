"""Reads the groups of devices of a collective from the text of a compiled program.

XLA has several forms for them, and newer releases write shorter ones::

    replica_groups={{0,1},{2,3}}
    replica_groups=[4,2]<=[2,4]T(1,0)
    replica_groups=mesh['x'=4,'y'=2], device_ids=([2,4]T(1,0)) {'x'}
    source_target_pairs={{0,1},{1,0}}

The second form counts devices in an array of this shape, with its axes in another
order. The third form names the axes of a mesh along which devices belong together.
"""

import math
import re
from collections.abc import Sequence

import numpy as np

_LISTED = re.compile(r"(?:replica_groups|source_target_pairs)=\{(\{[\d,{}]*\})\}")
_COUNTED = re.compile(r"replica_groups=\[(\d+),(\d+)\]<=(\[[\d,]+\](?:T\([\d,]+\))?)")
_OF_MESH = re.compile(
    r"replica_groups=(?:@?\w+)?\[((?:'[^']*'=\d+,?\s*)*)\]"
    r"(?:,\s*device_ids=\((.*?)\)(?=\s*\{))?\s*\{([^}]*)\}"
)
_AXIS = re.compile(r"'([^']*)'(?::\((\d+)\)(\d+)|=(\d+))?")
_NUMBERS = re.compile(r"\d+")


def find_groups(attributes: str, num_devices: int) -> Sequence[Sequence[int]]:
    """Returns the groups of a collective; one of all devices if it names none."""
    counted = _COUNTED.search(attributes)
    if counted:
        num_groups, size, order = counted.groups()
        shape = int(num_groups), int(size)
        return _count(order).reshape(shape).tolist()

    of_mesh = _OF_MESH.search(attributes)
    if of_mesh:
        mesh, device_ids, axes = of_mesh.groups()
        return _find_in_mesh(mesh, device_ids, axes).tolist()

    listed = _LISTED.search(attributes)
    if listed:
        texts = re.findall(r"\{([\d,]*)\}", listed[1])
        return [_as_numbers(text) for text in texts]
    return [list(range(num_devices))]


def _as_numbers(text: str) -> list[int]:
    return [int(number) for number in _NUMBERS.findall(text)]


def _count(text: str) -> np.ndarray:
    """Returns the devices in the order that a text such as `[2,4]T(1,0)` gives."""
    shape_text, _, order_text = text.partition("T")
    shape = _as_numbers(shape_text)
    devices = np.arange(math.prod(shape)).reshape(shape)
    return devices.transpose(_as_numbers(order_text) or None).flatten()


def _find_in_mesh(mesh: str, device_ids: str | None, axes: str) -> np.ndarray:
    """Returns the groups along some axes of a mesh, a row for each."""
    sizes = {name: int(size) for name, _, _, size in _AXIS.findall(mesh)}
    if device_ids is None:
        devices = np.arange(math.prod(sizes.values()))
    elif device_ids.startswith("["):
        devices = _count(device_ids)
    else:
        devices = np.asarray(_as_numbers(device_ids))

    # A part of an axis is `'x':(before)size`. It is an axis between two others.
    parts: dict[str, tuple[int, int]] = {}
    for name, before, size, _ in _AXIS.findall(axes):
        parts[name] = (int(before or 1), int(size or sizes[name]))

    shape: list[int] = []
    of_group: list[int] = []
    for name, whole in sizes.items():
        before, size = parts.get(name, (whole, 1))
        if name in parts:
            of_group.append(len(shape) + 1)
        after = whole // (before * size)
        shape += [before, size, after]

    # The axes of a group come last, so that a row has the devices of one group.
    others = [axis for axis in range(len(shape)) if axis not in of_group]
    by_group = devices.reshape(shape).transpose([*others, *of_group])
    num_in_group = math.prod(shape[axis] for axis in of_group)
    return by_group.reshape(-1, num_in_group)
