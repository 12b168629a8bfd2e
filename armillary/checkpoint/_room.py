"""Finds out whether memory has room for new arrays next to the ones they replace.

An accelerator says how much memory it has left. Arrays of CPU devices, of NumPy and in
`pinned_host` lie in the memory of the machine, of which the system, the container and
the limits of the process leave a part.
"""

import collections
import contextlib
import json
import math
import resource
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax

from armillary.checkpoint._arrays import count_buffer_bytes
from armillary.checkpoint._content import LeafSpec
from armillary.cluster._join import get_peers
from armillary.distribute._global_arrays import is_on_host

# Other programs and other parts of this program need memory, too.
_USABLE_SHARE = 0.9
_PROC = Path("/proc")
_CGROUP = Path("/sys/fs/cgroup")
# The line of `status` that counts for each limit of a process.
_COUNTED = {resource.RLIMIT_DATA: "VmData", resource.RLIMIT_AS: "VmSize"}


def all_have_room(leaves: Mapping[str, Any], specs: Mapping[str, LeafSpec]) -> bool:
    """Returns whether each process can hold another copy of some arrays.

    All processes must call it.
    """
    own = has_room(leaves, specs)
    texts = get_peers().gather("the memory for new arrays", json.dumps(own))
    return all(map(json.loads, texts))


def has_room(leaves: Mapping[str, Any], specs: Mapping[str, LeafSpec]) -> bool:
    """Returns whether this process can hold another copy of some arrays.

    Args:
        leaves: The arrays by path.
        specs: The descriptions of these arrays.
    """
    # By device, and `None` for the machine.
    needed: collections.Counter[Any] = collections.Counter()
    own_bytes: list[int] = []
    for path, leaf in leaves.items():
        parts = list(_find_parts(leaf, specs[path]))
        own_bytes.append(sum(size for _, size in parts))
        for place, size in parts:
            needed[place] += size
    # The values pass through buffers in the memory of the machine.
    needed[None] += count_buffer_bytes(own_bytes)

    for place, size in needed.items():
        most = _USABLE_SHARE * find_bytes_left(place)
        if size > most:
            return False
    return True


def _find_parts(leaf: Any, spec: LeafSpec) -> Iterator[tuple[Any, int]]:
    """Yields the device of each part of an array, or `None`, and the part's bytes."""
    if not isinstance(leaf, jax.Array):
        yield None, spec.own_bytes(None)
        return
    devices = leaf.sharding.addressable_devices
    for device in devices:
        is_in_machine = device.platform == "cpu" or is_on_host(leaf)
        size = spec.own_bytes(leaf.sharding) // len(devices)
        yield (None if is_in_machine else device), size


def find_bytes_left(place: Any) -> float:
    """Returns the free bytes of a device or, for `None`, of the machine.

    They are infinite if nothing tells them.
    """
    if place is None:
        return min(_find_left_in_machine(), default=math.inf)
    stats = place.memory_stats() or {}
    if not {"bytes_limit", "bytes_in_use"} <= stats.keys():
        return math.inf
    return stats["bytes_limit"] - stats["bytes_in_use"]


def _find_left_in_machine() -> Iterator[float]:
    """Yields the free bytes by each bound that the system knows."""
    own = _read_sizes(_PROC / "self" / "status")
    for limit, name in _COUNTED.items():
        most, _ = resource.getrlimit(limit)
        if most != resource.RLIM_INFINITY and name in own:
            yield most - own[name]

    machine = _read_sizes(_PROC / "meminfo")
    if "MemAvailable" in machine:
        yield machine["MemAvailable"]

    # Both files exist only in a container; without a limit, the first says `max`.
    with contextlib.suppress(OSError, ValueError):
        most = int((_CGROUP / "memory.max").read_text())
        yield most - int((_CGROUP / "memory.current").read_text())


def _read_sizes(path: Path) -> dict[str, int]:
    """Returns the sizes in a file of `/proc` in bytes; none on another system."""
    sizes: dict[str, int] = {}
    with contextlib.suppress(OSError):
        for line in path.read_text().splitlines():
            name, _, rest = line.partition(":")
            amount, _, unit = rest.strip().partition(" ")
            if unit == "kB":
                sizes[name] = 1024 * int(amount)
    return sizes
