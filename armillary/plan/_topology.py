"""What a user writes for devices: `v5e:16x16`, `h100:8x8`."""

import math
import re
from dataclasses import dataclass

from armillary.plan._targets import Target, find_target

_FORM = re.compile(r"([a-z0-9_.-]+):(\d+(?:x\d+)*)", re.IGNORECASE)
_EXAMPLE = (
    'Use a TPU slice such as "v5e:16x16" (chips along each axis), or hosts by devices '
    'such as "h100:8x8"'
)


@dataclass(frozen=True)
class Topology:
    """Devices, and how they are connected.

    Attributes:
        text: As the user wrote it.
        target: What kind they are; `None` if only their number matters.
        shape: Chips along each axis, or hosts and devices of each.
    """

    text: str
    target: Target | None
    shape: tuple[int, ...]

    @property
    def num_devices(self) -> int:
        """How many there are."""
        return math.prod(self.shape)

    @property
    def devices_per_host(self) -> int | None:
        """Devices of one host; `None` where links do not end at hosts."""
        is_gpu = self.target is not None and self.target.platform == "cuda"
        return self.shape[1] if is_gpu else None

    @property
    def xla_name(self) -> str:
        """What JAX calls it: of GPUs slices, hosts and devices."""
        sizes = "x".join(map(str, self.shape))
        if self.devices_per_host is not None:
            return f"1x{sizes}"
        return f"{self.text.partition(':')[0].lower()}:{sizes}"


def parse_topology(
    topology: str | int, target: Target | None = None, *, abstract: bool = False
) -> Topology:
    """Returns the devices that a text describes.

    A number of them will do for an abstract plan, and `target` replaces the kind that
    the text names.
    """
    text = str(topology)
    if abstract and text.isdecimal() and int(text) > 0:
        return Topology(text, target, (int(text),))
    found = _FORM.fullmatch(text)
    if found is None or not all(shape := [int(n) for n in found[2].split("x")]):
        number = ', or a number of devices such as "256"' if abstract else ""
        raise ValueError(
            f"`topology` is {topology!r}, which describes no devices. {_EXAMPLE}"
            f"{number}."
        )
    name = found[1].lower()
    kind = target or find_target(name)
    if kind.platform == "cuda" and len(shape) != 2:
        raise ValueError(
            f"`topology` is {topology!r}, but GPUs are given as hosts by devices of "
            f'each host. Write "{name}:1x{math.prod(shape)}" for one host.'
        )
    return Topology(text, kind, tuple(shape))
