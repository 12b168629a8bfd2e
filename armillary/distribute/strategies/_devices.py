"""Devices by object or by name, checked before anything is built on them."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import jax

from armillary.distribute._strategy import Strategy

if TYPE_CHECKING:
    # jax.Device is a class made by the extension module, which type checkers cannot
    # see.
    Device: TypeAlias = Any
else:
    Device = jax.Device


def as_device(name: str, device: Any) -> Device:
    """Returns a device given as a `jax.Device` or as a name such as `"gpu:1"`."""
    if isinstance(device, Device):
        return device
    platform, _, index = str(device).lower().strip("/").rpartition(":")
    platform = platform.rpartition("/")[2].removeprefix("device:")
    try:
        if not platform:
            raise ValueError("no platform")  # JAX would take any platform
        found = jax.local_devices(backend=platform)[int(index)]
    except (RuntimeError, ValueError, IndexError) as error:
        known = ", ".join(_name(device) for device in jax.local_devices())
        raise ValueError(
            f"`{name}` is {device!r}, but this process has no such device. Its devices "
            f"are {known}: pass one of these names, or a `jax.Device`."
        ) from error
    return found


def as_devices(name: str, devices: Any) -> list[Device]:
    """Returns a checked list of devices; all local ones for `None`."""
    if devices is None:
        return list(jax.local_devices())
    if isinstance(devices, str) or not isinstance(devices, Sequence) or not devices:
        raise ValueError(
            f"`{name}` is {devices!r}, but it must be a sequence of at least one "
            f"device. Use `{name}=jax.local_devices()`, or names as in "
            f'`{name}=["cpu:0", "cpu:1"]`.'
        )
    found = [as_device(name, device) for device in devices]
    names = [_name(device) for device in found]
    if len(set(found)) < len(found):
        raise ValueError(
            f"`{name}` is {names}, which repeats a device. Each replica needs a device "
            "of its own: name each device once."
        )
    if len({device.platform for device in found}) > 1:
        raise ValueError(
            f"`{name}` is {names}, which mixes platforms. Replicas run one program in "
            "step: use devices of one platform."
        )
    return found


def check_alone(strategy: Strategy) -> None:
    """Raises if a strategy that is to be planned spans several processes."""
    if strategy.peers is not None:
        raise ValueError(
            f"The strategy is {strategy!r}, but a plan is made by one process. Start "
            "the program without the others, or use `armillary plan`."
        )


def _name(device: Device) -> str:
    return f"{device.platform}:{device.id}"
