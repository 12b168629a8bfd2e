"""Makes arrays on the devices of several processes from the arrays of each process.

`jax.device_put` first compares values over the network. Here, nothing is sent: state is
compared once, by fingerprint, and each process has its own batches. The only exception
is an array that is divided between the processes, if a program needs all of it.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.core import Tracer
from jax.sharding import (
    AbstractMesh,
    AxisType,
    Mesh,
    NamedSharding,
    PartitionSpec,
    Sharding,
)

from armillary.typing import PyTree


def everywhere(mesh: Mesh | AbstractMesh) -> NamedSharding:
    """Returns the sharding with a copy of an array on each device of a mesh."""
    return NamedSharding(mesh, PartitionSpec())


def make_auto_mesh(devices: np.ndarray, names: Sequence[str]) -> Mesh:
    """Returns a mesh over whose axes XLA divides a program itself."""
    types = (AxisType.Auto,) * len(names)
    return Mesh(devices, tuple(names), axis_types=types)


def narrow_mesh(mesh: Mesh, num_replicas: int | None) -> Mesh:
    """Returns a mesh with `num_replicas` replicas over the same devices.

    `None` keeps the number. The devices along the second axis do the same work: with 4
    devices and 2 replicas, devices 0 and 1 are replica 0. So code over the first axis
    runs as on 2 devices.
    """
    (axis,) = mesh.axis_names
    if num_replicas in (None, mesh.shape[axis]):
        return mesh
    devices = mesh.devices.reshape(num_replicas, -1)
    # The two axes of a mesh need different names.
    copies = "copy" if axis != "copy" else "copies"
    return make_auto_mesh(devices, (axis, copies))


def as_global(leaf: Any, sharding: Sharding) -> jax.Array:
    """Returns a global array from a value that is equal on all processes.

    All processes must call it.
    """
    if is_key(leaf):
        return on_data(lambda data: as_global(data, sharding), leaf)
    if is_divided(leaf):
        return _move(leaf, sharding)

    host = np.asarray(leaf)

    def copy_part(index: Any) -> np.ndarray:
        # Devices must not share memory with `leaf`, because its owner may donate it.
        return np.array(host[index])

    return jax.make_array_from_callback(host.shape, sharding, copy_part)


def place_parts(leaf: Any, sharding: Sharding) -> jax.Array:
    """Returns a global array of parts of `leaf`, which each process has completely."""
    parts: dict[str, np.ndarray] = {}

    def read(index: Any) -> np.ndarray:
        key = str(index)  # Several devices may have copies of the same part.
        if key not in parts:
            parts[key] = leaf[index]
        return parts[key]

    return jax.make_array_from_callback(np.shape(leaf), sharding, read)


def place_rows(
    arrays: PyTree,
    sharding: Sharding,
    axis: int,
    rows: range,
    num_rows: int,
) -> PyTree:
    """Returns global arrays with all rows, from the `rows` of this process."""

    def place(leaf: Any) -> jax.Array:
        host = np.asarray(leaf)
        before = host.shape[:axis]
        after = host.shape[axis + 1 :]
        shape = (*before, num_rows, *after)

        def read(index: Any) -> np.ndarray:
            # From a row of the global array to a row of this process.
            first = index[axis].start or 0
            own = first - rows.start
            row = slice(own, own + 1)
            own_index = (*index[:axis], row, *index[axis + 1 :])
            return host[own_index]

        return jax.make_array_from_callback(shape, sharding, read)

    return jax.tree.map(place, arrays)


def as_local(leaf: Any) -> Any:
    """Returns a global array as a local array; all processes must call it."""
    if not isinstance(leaf, jax.Array) or leaf.is_fully_addressable:
        return leaf
    if is_key(leaf):
        return on_data(as_local, leaf)
    host = np.array(as_whole(leaf))
    return jax.numpy.asarray(host)


def with_auto_axes(leaf: Any) -> Any:
    """Returns an array on a mesh with `Explicit` axes as one with `Auto` axes.

    Nothing is copied. In a step under a strategy, XLA divides all operations.
    """
    if not isinstance(leaf, jax.Array) or isinstance(leaf, Tracer):
        return leaf
    sharding = leaf.sharding
    if not isinstance(sharding, NamedSharding) or not isinstance(sharding.mesh, Mesh):
        return leaf
    mesh = sharding.mesh
    if AxisType.Explicit not in mesh.axis_types:
        return leaf

    auto_mesh = make_auto_mesh(mesh.devices, mesh.axis_names)
    kind = sharding.memory_kind
    auto = NamedSharding(auto_mesh, sharding.spec, memory_kind=kind)
    return jax.device_put(leaf, auto)


PINNED_HOST = "pinned_host"
"""The memory of the host from which devices copy directly, as JAX names it."""


def is_on_host(leaf: Any) -> bool:
    """Returns whether a user has put an array into the memory of the host."""
    if not isinstance(leaf, jax.Array) or isinstance(leaf, Tracer):
        return False
    return leaf.sharding.memory_kind == PINNED_HOST


def is_divided(leaf: Any) -> bool:
    """Returns whether each process has only a part of an array."""
    return (
        isinstance(leaf, jax.Array)
        and not leaf.is_fully_addressable
        and not leaf.is_fully_replicated
    )


def as_whole(leaf: Any) -> Any:
    """Returns the full array on every process; all processes must call it."""
    if not is_divided(leaf):
        return leaf
    return _move(leaf, _on_all_devices(leaf))


def _on_all_devices(leaf: jax.Array) -> NamedSharding:
    """Returns the sharding with a copy on each device that has a part of an array."""
    devices = list(leaf.sharding.devices_indices_map(leaf.shape))
    return everywhere(Mesh(np.asarray(devices), ("device",)))


def read_part(leaf: Any, box: tuple[slice, ...]) -> np.ndarray:
    """Returns a part of an array on the host; all processes must call it.

    The devices send each other this part alone. `box` has a start and a stop for each
    axis.
    """
    if not isinstance(leaf, jax.Array):
        return np.asarray(leaf[box])
    sizes = tuple(along_axis.stop - along_axis.start for along_axis in box)
    if is_on_host(leaf):
        # A program cannot cut an array in the memory of the host.
        on_device = leaf.sharding.with_memory_kind("device")
        leaf = jax.device_put(leaf, on_device)
    if leaf.is_fully_replicated:
        leaf = leaf.addressable_data(0)
    if sizes == leaf.shape:
        return np.asarray(as_whole(leaf))

    cut = _make_cut(_on_all_devices(leaf), sizes)
    starts = np.array([along_axis.start for along_axis in box], np.int32)
    # CPU devices may run only one program at a time; see `_dispatch`.
    jax.block_until_ready(leaf)
    part = jax.block_until_ready(cut(leaf, starts))
    return np.asarray(part.addressable_data(0))


def _move(leaf: jax.Array, sharding: Sharding) -> jax.Array:
    """Returns an array with another sharding, sent over the network."""
    move = _make_move(sharding)
    # CPU devices may run only one program at a time; see `_dispatch`.
    jax.block_until_ready(leaf)
    return jax.block_until_ready(move(leaf))


@functools.lru_cache(maxsize=256)
def _make_move(sharding: Sharding) -> Callable[[jax.Array], jax.Array]:
    # Cached, because JAX compiles again for each new function object.
    return jax.jit(lambda array: array, out_shardings=sharding)


@functools.lru_cache(maxsize=256)
def _make_cut(
    sharding: Sharding, sizes: tuple[int, ...]
) -> Callable[[jax.Array, np.ndarray], jax.Array]:
    def cut(array: jax.Array, starts: jax.Array) -> jax.Array:
        return jax.lax.dynamic_slice(array, starts, sizes)

    return jax.jit(cut, out_shardings=sharding)


def on_data(fn: Callable[[jax.Array], Any], keys: jax.Array) -> jax.Array:
    """Returns random keys with a function applied to their data."""
    data = fn(jax.random.key_data(keys))
    return jax.random.wrap_key_data(data, impl=jax.random.key_impl(keys))


def is_array_or_number(leaf: Any) -> bool:
    """Returns whether a value is an array or a number of JAX or NumPy."""
    return isinstance(leaf, jax.Array | np.ndarray | np.generic)


def is_key(leaf: Any) -> bool:
    """Returns whether a value is an array of typed random keys."""
    if not isinstance(leaf, jax.Array):
        return False
    return jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)
