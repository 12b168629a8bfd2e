"""The known devices, and the texts that describe them: `v5e:16x16`, `h100:8x8`.

Several slices of TPUs are `4xv5e:16x16`, and virtual CPU devices are `cpu:64`.

Sizes of memory are the published ones. The other properties of a GPU for XLA are from
https://github.com/openxla/xla/tree/main/xla/backends/gpu/target_config/specs.
"""

import math
import re
from dataclasses import dataclass
from typing import Literal, NamedTuple

from armillary._checks import check_instance, check_not_negative, check_one_of


@dataclass(frozen=True, kw_only=True)
class Target:
    """One kind of device.

    Args:
        name: Its name.
        platform: `"tpu"`, `"cuda"` or `"cpu"`.
        memory_bytes: Memory of one device; `None` if it is not known.
        config: The properties that XLA's GPU compiler needs, as a
            `GpuTargetConfigProto` in text. Only for GPUs.

    Raises:
        TypeError: If `name` or `config` is not a string.
        ValueError: If `memory_bytes` is negative or not finite, or `platform` has
            another value.
    """

    name: str
    platform: Literal["tpu", "cuda", "cpu"]
    memory_bytes: float | None
    config: str | None = None

    def __post_init__(self) -> None:
        fix = "See `armillary.plan.find_target` for the known devices."
        check_instance("name", self.name, str, fix)
        check_instance("config", self.config, str | None, fix)
        check_one_of("platform", self.platform, ("tpu", "cuda", "cpu"))
        if self.memory_bytes is not None:
            check_not_negative("memory_bytes", self.memory_bytes)


class _Architecture(NamedTuple):
    """The properties that all GPUs of one generation share."""

    capability: int  # The major number.
    device: str  # Further fields of XLA's `gpu_device_info`.


_AMPERE = _Architecture(
    8,
    "shared_memory_per_core: 167936 shared_memory_per_block_optin: 166912 "
    "core_count: 108 fpus_per_core: 64 l2_cache_size: 41943040 clock_rate_ghz: 1.41",
)
_HOPPER = _Architecture(
    9,
    "shared_memory_per_core: 233472 shared_memory_per_block_optin: 232448 "
    "core_count: 132 fpus_per_core: 128 l2_cache_size: 52428800 clock_rate_ghz: 1.98",
)
_BLACKWELL = _Architecture(
    10,
    "shared_memory_per_core: 233472 shared_memory_per_block_optin: 232448 "
    "core_count: 148 fpus_per_core: 128 l2_cache_size: 132644864 clock_rate_ghz: 1.965",
)


def _gpu(
    name: str, memory: int, bandwidth: float, architecture: _Architecture
) -> Target:
    config = f"""gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
  threads_per_core_limit: 2048 registers_per_core_limit: 65536
  registers_per_block_limit: 65536 block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535 block_dim_limit_z: 65535 {architecture.device}
  memory_bandwidth: {bandwidth:.0f} device_memory_size: {memory}
  cuda_compute_capability {{ major: {architecture.capability} }}
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 8 }}
runtime_version {{ major: 12 minor: 8 }}
device_description_str: "NVIDIA {name.upper()}"
"""
    return Target(name=name, platform="cuda", memory_bytes=memory, config=config)


def _tpu(name: str, memory: float) -> Target:
    return Target(name=name, platform="tpu", memory_bytes=memory)


TARGETS = {
    target.name: target
    for target in (
        _tpu("v4", 32 * 2**30),
        _tpu("v5e", 16e9),
        _tpu("v5p", 95e9),
        _tpu("v6e", 32e9),
        _gpu("a100", 85100068864, 2.039e12, _AMPERE),
        _gpu("h100", 84942979072, 3.352e12, _HOPPER),
        _gpu("h200", 151397597184, 4.8e12, _HOPPER),
        _gpu("b200", 191514411008, 7.672e12, _BLACKWELL),
        Target(name="cpu", platform="cpu", memory_bytes=None),
    )
}


def find_target(name: str) -> Target:
    """Returns a known device, such as `v5e` or `h100`.

    Raises:
        ValueError: If it is not known.
    """
    if not isinstance(name, str) or name not in TARGETS:
        raise ValueError(
            f"The name {name!r} is not the name of a known device. Use one of "
            f"{', '.join(TARGETS)}, or describe the device with "
            "`target=armillary.plan.Target(...)`."
        )
    return TARGETS[name]


_FORM = re.compile(r"(?:(\d+)x(?=[a-z]))?([a-z0-9_.-]+):(\d+(?:x\d+)*)", re.IGNORECASE)


@dataclass(frozen=True)
class Topology:
    """Devices, and their numbers along each axis of their connections.

    Attributes:
        text: The text that describes them.
        target: The kind of the devices; `None` in an abstract plan for a number.
        shape: The number of devices of a slice along each axis; for GPUs and CPUs,
            hosts by devices.
        num_slices: The number of slices.
        name: The name of the kind of device in the text.
    """

    text: str
    target: Target | None
    shape: tuple[int, ...]
    num_slices: int = 1
    name: str = ""

    @property
    def num_devices(self) -> int:
        return self.num_slices * math.prod(self.shape)

    @property
    def xla_name(self) -> str:
        """The name that JAX uses. For GPUs it contains slices, hosts and devices."""
        sizes = "x".join(map(str, self.shape))
        if self.target is not None and self.target.platform == "cuda":
            return f"1x{sizes}"
        return f"{self.name}:{sizes}"

    @property
    def num_groups(self) -> int | None:
        """The number of groups with slow links between them; `None` if not known.

        They are slices, or else hosts. The hosts of a TPU slice are not known here.
        """
        if self.num_slices > 1:
            return self.num_slices
        is_of_hosts = self.target is not None and self.target.platform != "tpu"
        return self.shape[0] if is_of_hosts and len(self.shape) == 2 else None


def parse_topology(
    topology: str | int, target: Target | None = None, *, abstract: bool = False
) -> Topology:
    """Returns the devices that a text describes."""
    text = str(topology)
    if abstract and text.isdecimal() and int(text) > 0:
        return Topology(text, target, (int(text),))
    found = _FORM.fullmatch(text)
    shape = [int(size) for size in found[3].split("x")] if found else [0]
    num_slices = int(found[1] or 1) if found else 0
    if found is None or 0 in shape or num_slices == 0:
        number = ', or a number of devices such as "256"' if abstract else ""
        raise ValueError(
            f"`topology` is {topology!r}, which describes no devices. Use the chips "
            'along each axis of a TPU slice, as in "v5e:16x16" or "4xv5e:16x16" for '
            f'four slices, or hosts by devices, as in "h100:8x8"{number}.'
        )
    name = found[2].lower()
    kind = target or find_target(name)
    if kind.platform == "cuda" and (len(shape) != 2 or num_slices > 1):
        hosts = f'"{name}:{num_slices}x{math.prod(shape)}"'
        if len(shape) == 2:
            hosts = f'"{name}:{num_slices * shape[0]}x{shape[1]}"'
        elif num_slices == 1:
            hosts += " for one host"
        raise ValueError(
            f"`topology` is {topology!r}, but GPUs are given as hosts by devices of "
            f"each host. Write {hosts}."
        )
    if kind.platform == "cpu" and len(shape) > 2:
        raise ValueError(
            f"`topology` is {topology!r}, but CPU devices are given as their number, "
            f'or as hosts by devices. Write "{name}:{math.prod(shape)}".'
        )
    return Topology(text, kind, tuple(shape), num_slices, name)
