"""Compares values that must be equal in all processes, or on all replicas.

If processes have different programs, constants or rows, results are wrong without any
error, or the processes wait forever. If a bit flips in one copy of the state, only
checksums of the copies show it.
"""

import hashlib
import json
import re
import zlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core
from jax.sharding import Mesh, PartitionSpec

from armillary._checks import list_lines
from armillary.cluster._peers import Peers
from armillary.data.sources._arrays import IndexedDataset
from armillary.distribute._dispatch import Dispatch
from armillary.distribute._global_arrays import (
    everywhere,
    find_replica_axis,
    is_divided,
    is_key,
)
from armillary.errors import PeerError, ReplicaDivergenceError
from armillary.state._captured import find_constants
from armillary.state._holders import captured

_OPTIONS = ("batch_size", "repeat", "drop_remainder")
_TOPICS = {
    "state": (
        "Arrays of the state differ between processes",
        "Begin with the same values: use the same random seed on all processes "
        "(`nnx.Rngs(0)`, `keras.utils.set_random_seed(0)`), and nothing that depends "
        "on the process.",
    ),
    "the values for `reduce` or `gather`": (
        "`strategy.reduce` or `strategy.gather` was given values that all replicas "
        "share, but they differ between processes",
        "Compute them from the same values in all processes. For a different value on "
        "each replica, use the results of `strategy.run` for batches.",
    ),
    "a data set for all": (
        "A data set that is distributed over all processes is not the same in each",
        "Give all processes the same data, `batch_size` and `shuffle_seed`. If each "
        "process reads data of its own, use a function with an `input_context` "
        "(`make_distributed_dataset`).",
    ),
}
"""For each topic of a comparison: the meaning of a difference, and the advice."""


def check_same(peers: Peers, topic: str, values: Mapping[str, Any]) -> None:
    """Raises if arrays, or texts, of a topic differ between processes."""
    own = {
        name: value if isinstance(value, str) else describe_value(value)
        for name, value in values.items()
    }
    if differing := find_differences(peers, topic, own):
        problem, fix = _TOPICS[topic]
        raise PeerError(f"{problem}:\n{_list(differing)}\n{fix}")


def check_same_data(peers: Peers, dataset: IndexedDataset) -> None:
    """Raises if a data set that all processes share differs between them."""
    options = {name: repr(getattr(dataset, name)) for name in _OPTIONS}
    order = {name: str(value) for name, value in dataset.order_of_examples.items()}
    check_same(peers, "a data set for all", options | order)


def find_differences(peers: Peers, topic: str, own: dict[str, str]) -> dict[str, str]:
    everyone = [json.loads(text) for text in peers.gather(topic, json.dumps(own))]
    names = dict.fromkeys(name for each in everyone for name in each)
    return {
        name: ", ".join(
            f"process {index} has {each.get(name, 'no such array')}"
            for index, each in enumerate(everyone)
        )
        for name in names
        if len({each.get(name) for each in everyone}) > 1
    }


def describe_value(array: Any) -> str:
    """Returns dtype, shape and, if this process has the full array, a fingerprint."""
    if is_key(array):
        array = jax.random.key_data(array)
    if is_divided(array):
        return f"{array.dtype.name} {array.shape}"
    values = np.ascontiguousarray(array)
    data = values.reshape(-1).view(np.uint8).data
    digest = hashlib.blake2b(data, digest_size=6).hexdigest()
    return f"{values.dtype.name} {tuple(np.shape(array))} #{digest}"


def _list(differing: Mapping[str, str]) -> str:
    return list_lines(f"{name}: {text}" for name, text in differing.items())


def check_same_program(
    peers: Peers,
    name: str,
    program: core.ClosedJaxpr,
    fn: Callable[..., Any],
    arguments: Mapping[str, Any] | None = None,
) -> None:
    """Raises if programs, constants or arguments of `fn` differ between processes."""
    # Addresses of Python objects always differ.
    lines = re.sub(r"0x[0-9a-f]+", "0x", str(program)).splitlines()
    known = {id(value): f"`{key}`" for key, value in captured(fn)}
    values = {
        f"{known.get(id(constant), 'a constant')} ({number})": describe_value(constant)
        for number, constant in enumerate(find_constants(program))
    }
    given = (arguments or {}).items()
    values |= {f"`{key}`": describe_value(value) for key, value in given}
    digest = hashlib.sha256(json.dumps([lines, *values.values()]).encode()).hexdigest()
    if len(set(peers.gather(f"the program of {name}", digest))) == 1:
        return
    # Checksums first, because a program may have a hundred thousand lines.
    sums = {str(i): f"{zlib.crc32(line.encode()):x}" for i, line in enumerate(lines)}
    if differing := find_differences(peers, f"the lines of {name}", sums):
        first = int(next(iter(differing)))
        shown = {f"line {first + 1}": "".join(lines[first : first + 1]).strip()}
        raise PeerError(
            f"`{name}` is traced to different programs in different processes, which "
            "would wait for each other forever:\n"
            f"{_list(find_differences(peers, f'where {name} differs', shown))}\n"
            "Let nothing in the step depend on the process: `jax.process_index()`, the "
            "host's name, the time, or an argument that only some processes were given."
        )
    differing = find_differences(peers, f"the constants of {name}", values)
    raise PeerError(
        f"`{name}` computes with different values in different processes, but all must "
        f"have the same:\n{_list(differing)}\n"
        "Values that a step captures, and arguments that all replicas share, must come "
        "from one seed and the same data in all processes. Put values that differ "
        "between replicas into the batches."
    )


def largest_on_replicas(
    mesh: Mesh | None, fn: Callable[[Sequence[Any]], Any], arrays: Sequence[Any]
) -> Any:
    """Returns the largest `fn(arrays)` of all replicas, on all replicas."""
    axis = find_replica_axis(mesh)
    if mesh is None or axis is None or mesh.size == 1:
        return fn(arrays)
    mapped = jax.shard_map(
        lambda arrays: jax.lax.pmax(fn(arrays), axis),
        mesh=mesh,
        in_specs=PartitionSpec(),
        out_specs=PartitionSpec(),
        check_vma=False,
    )
    return mapped(list(arrays))


class ReplicaComparison:
    """Compares the copies that the replicas of a mesh hold of some arrays."""

    def __init__(self, mesh: Mesh | None, dispatch: Dispatch) -> None:
        self._dispatch = dispatch
        self._compiled = None
        axis = find_replica_axis(mesh)
        if mesh is not None and axis is not None and mesh.size > 1:
            rows = jax.shard_map(
                lambda arrays: jnp.stack(list(map(_checksum, arrays)))[None],
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


def check_equal(sums: np.ndarray, paths: Sequence[str], when: str) -> None:
    """Raises if the checksums of a `ReplicaComparison` differ between replicas."""
    count = len(sums)
    differing = {
        path: _minority(column.tolist())
        for path, column in zip(paths, sums.T, strict=True)
        if (column != column[0]).any()
    }
    if not differing:
        return
    shown = {
        path: f"replica{'s' * (len(replicas) > 1)} {', '.join(map(str, replicas))}"
        if len(replicas) < count
        else "no majority of replicas agrees"
        for path, replicas in differing.items()
    }
    raise ReplicaDivergenceError(
        f"{len(differing)} of {len(paths)} arrays of the state must be equal on all "
        f"{count} replicas, but {when} they are not:\n{_list(shown)}\n"
        "Either the memory or the arithmetic of a device is faulty, or code outside "
        "the step assigned an array whose copies differ. Restore an earlier checkpoint "
        "(`controller.restore_checkpoint(path)`). If it happens again on the same "
        "device, do not use that device.",
        leaves=differing,
    )


def _minority(column: list[int]) -> tuple[int, ...]:
    """Returns the replicas that differ from most others, or all without a majority."""
    value, count = Counter(column).most_common(1)[0]
    if 2 * count <= len(column):
        return tuple(range(len(column)))
    return tuple(i for i, other in enumerate(column) if other != value)


def _checksum(array: Any) -> Any:
    """Returns a checksum of values and their places; any changed value changes it."""
    bits = _as_words(array)
    place = jax.lax.iota(jnp.uint32, bits.size)
    mixed = (bits ^ (place * np.uint32(0x85EBCA6B))) * np.uint32(0x9E3779B1)
    mixed = (mixed ^ (mixed >> np.uint32(15))) * np.uint32(0xC2B2AE35)
    return jnp.sum(mixed ^ (mixed >> np.uint32(13)), dtype=jnp.uint32)


def _as_words(array: Any) -> Any:
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
