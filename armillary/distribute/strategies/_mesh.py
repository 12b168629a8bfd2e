"""The mesh of a `ShardedStrategy`: from sizes of axes, or a mesh of the user."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import numpy as np
from jax.sharding import Mesh

from armillary._checks import check_instance, check_positive_int
from armillary._planned import has_stand_ins, is_planning
from armillary.cluster._peers import Peers
from armillary.distribute._global_arrays import make_auto_mesh
from armillary.distribute.strategies._layouts import as_devices
from armillary.distribute.strategies._multi_worker import order_devices

DATA = "data"
FSDP = "fsdp"
TENSOR = "tensor"
USUAL_AXES = (DATA, FSDP, TENSOR)

MeshChoice: TypeAlias = Mapping[str, int] | Mesh | Callable[[], Mesh]
"""A mesh as users give it: sizes of axes, JAX's own object, or a function of none."""

_FIX = 'Use `mesh={"fsdp": 8}` or a `jax.sharding.Mesh`, or leave it out.'


def check_mesh(argument: str, mesh: Any, devices: Any, dcn: Any) -> None:
    """Raises if the arguments cannot describe a mesh, before any device is used.

    `argument` is the name of the argument `mesh` in messages.
    """
    fix = 'Write `dcn={"data": 2}`, or leave it out.'
    check_instance("dcn", dcn, Mapping | None, fix)
    if mesh is None or isinstance(mesh, Mapping):
        _check_sizes(argument, mesh or {})
        _check_sizes("dcn", dcn or {})
        _check_across(mesh, dcn or {})
        return

    if not isinstance(mesh, Mesh) and not callable(mesh):
        check_instance(argument, mesh, Mapping | Mesh, _FIX)
    for name, value in (("devices", devices), ("dcn", dcn)):
        if value is not None:
            raise ValueError(
                f"`mesh` is a mesh with devices of its own, so `{name}` has no "
                f"meaning. Leave `{name}` out, or give the sizes of the axes as a "
                'dictionary: `mesh={"data": 2, "fsdp": 4}`.'
            )


def make_mesh(argument: str, mesh: Any, devices: Any, dcn: Any, peers: Peers) -> Mesh:
    """Returns the mesh that checked arguments describe, with axes of the type `Auto`.

    XLA divides a step, so a step is written for whole arrays. In a mesh with axes of
    the type `Explicit`, JAX would instead ask it to state each division.

    Raises:
        ValueError: If there are more or fewer devices than places in the mesh, a
            process has no device in it, or devices do not form the groups of `dcn`.
    """
    if mesh is not None and not isinstance(mesh, Mapping):
        own = mesh if isinstance(mesh, Mesh) else mesh()
        check_instance(f"{argument}()", own, Mesh, "Return a `jax.sharding.Mesh`.")
        arranged = own.devices
        names = own.axis_names
    else:
        chosen = _choose_devices(mesh, peers) if devices is None else devices
        found = as_devices("devices", chosen)
        sizes = _sizes_for(mesh, len(found))
        _check_count(argument, sizes, len(found), peers)
        arranged = _arrange(found, sizes, dcn or {})
        names = list(sizes)

    _check_processes("mesh" if devices is None else "devices", arranged, peers)
    return make_auto_mesh(arranged, names)


def _choose_devices(mesh: Mapping[str, int] | None, peers: Peers) -> Any:
    """Returns the devices for a user who names none; `None` for all of this process."""
    if not peers.is_alone:
        return order_devices(jax.devices())
    if mesh is not None and has_stand_ins():
        # A plan has stand-ins for any mesh, and this mesh needs only some of them.
        return jax.local_devices()[: math.prod(mesh.values())]
    return None


def choose_batch_axes(mesh: Mesh, batch_axes: Sequence[str] | None) -> tuple[str, ...]:
    """Returns the axes that examples are divided over."""
    if batch_axes is None:
        usual = [name for name in mesh.axis_names if name in (DATA, FSDP)]
        return tuple(usual or mesh.axis_names)

    fix = 'Write `batch_axes=("data",)`.'
    is_text = isinstance(batch_axes, str | bytes)
    check_instance("batch_axes", None if is_text else batch_axes, Sequence, fix)
    unknown = [name for name in batch_axes if name not in mesh.axis_names]
    if unknown:
        raise ValueError(
            f"`batch_axes` has {unknown[0]!r}, which is not an axis of the mesh. Use "
            f"some of {list(mesh.axis_names)}."
        )
    if len(set(batch_axes)) < len(batch_axes):
        raise ValueError(
            f"`batch_axes` is {list(batch_axes)}, which repeats an axis. Name each "
            "axis once."
        )
    return tuple(batch_axes)


def choose_growing_axis(mesh: Mesh, batch_axes: Sequence[str], is_usual: bool) -> str:
    """Returns the axis that gets more devices in a plan for more devices.

    `is_usual` is true if a user has given no mesh.
    """
    if is_usual:
        return FSDP
    if DATA in batch_axes:
        return DATA
    return [*batch_axes, *mesh.axis_names][0]


def _check_sizes(argument: str, sizes: Mapping[str, int]) -> None:
    for name, size in sizes.items():
        check_instance(argument, name, str, _FIX)
        check_positive_int(f'{argument}["{name}"]', size)


def _check_across(sizes: Mapping[str, int] | None, dcn: Mapping[str, int]) -> None:
    """Raises if slow links cannot divide the axes of a mesh."""
    for name, count in dcn.items():
        if sizes is None or name not in sizes:
            shown = "no axis" if sizes is None else f"the axes {list(sizes)}"
            raise ValueError(
                f"`dcn` has an axis {name!r}, but `mesh` has {shown}. Give the size of "
                f'this axis over all devices, such as `mesh={{"{name}": 8}}`.'
            )
        if sizes[name] % count:
            raise ValueError(
                f"`dcn` divides the axis {name!r} into {count} groups, but its size is "
                f"{sizes[name]}. The size of an axis counts all of its devices: choose "
                f"a multiple of {count}."
            )


def _sizes_for(sizes: Mapping[str, int] | None, num_devices: int) -> dict[str, int]:
    """Returns the sizes of all axes, in the order of the mesh.

    Each usual axis is there, if need be with size 1, so that rules may name it.
    """
    given = {FSDP: num_devices} if sizes is None else dict(sizes)
    if set(given) <= set(USUAL_AXES):
        return {name: given.get(name, 1) for name in USUAL_AXES}

    names = list(given)
    if DATA not in names:
        names.insert(0, DATA)
    if FSDP not in names:
        names.insert(names.index(DATA) + 1, FSDP)
    if TENSOR not in names:
        names.append(TENSOR)
    return {name: int(given.get(name, 1)) for name in names}


def _arrange(
    devices: Sequence[Any], sizes: Mapping[str, int], dcn: Mapping[str, int]
) -> Any:
    """Returns devices as an array with the shape of the mesh.

    With `dcn`, the devices of a group, such as a slice, are next to each other along
    each axis. In a plan, these devices stand for others, which have the groups.
    """
    if not dcn or is_planning():
        return np.asarray(devices).reshape(tuple(sizes.values()))

    across = [dcn.get(name, 1) for name in sizes]
    slices = {getattr(device, "slice_index", None) for device in devices}
    has_slices = len(slices) > 1
    processes = {device.process_index for device in devices}
    groups = slices if has_slices else processes
    noun = "slices" if has_slices else "processes"
    if len(groups) == 1:
        noun = "slice" if has_slices else "process"
    if len(groups) != math.prod(across):
        raise ValueError(
            f"`dcn` is {dict(dcn)}, for {math.prod(across)} groups of devices with "
            f"slow links between them, but the devices are of {len(groups)} {noun}. "
            f"Choose sizes whose product is {len(groups)}, or leave `dcn` out."
        )
    # Only here, because a program must find JAX as it would be without this library.
    from jax.experimental import mesh_utils

    pairs = zip(sizes.values(), across, strict=True)
    inside = [size // count for size, count in pairs]
    return mesh_utils.create_hybrid_device_mesh(
        inside, across, devices, process_is_granule=not has_slices
    )


def _check_count(
    argument: str,
    sizes: Mapping[str, int],
    num_devices: int,
    peers: Peers,
) -> None:
    """Raises if devices do not fill a mesh."""
    product = math.prod(sizes.values())
    if product == num_devices:
        return
    where = "" if peers.is_alone else f" in {peers.count} processes"
    fix = f"Choose sizes whose product is {num_devices}"
    if peers.is_alone and product < num_devices:
        fix += f", or use fewer devices: `devices=jax.devices()[:{product}]`"
    raise ValueError(
        f"`{argument}` is {dict(sizes)}, for {product} devices, but there are "
        f"{num_devices}{where}. {fix}."
    )


def _check_processes(argument: str, devices: Any, peers: Peers) -> None:
    """Raises if a mesh leaves out a process, or has devices of another program."""
    if peers.is_alone:
        return
    owners = {device.process_index for device in devices.flat}
    idle = set(range(peers.count)) - owners
    if idle:
        raise ValueError(
            f"`{argument}` has no device of process {min(idle)} of {peers.count}, but "
            "all processes run each step. Take devices of each process from "
            f"`jax.devices()`, or leave `{argument}` out."
        )
