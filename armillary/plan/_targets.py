"""The devices that are known, and what a user writes for them: `v5e:16x16`, `h100:8x8`.

The figures are those that makers publish. Peaks are for dense products, in operations
per second. `float32` is what XLA's default precision runs: one pass in bfloat16 on
TPUs, TensorFloat-32 on NVIDIA GPUs. A link's figure is one direction, summed over a
device's links.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from armillary._checks import check_instance, check_not_negative, check_one_of

_CLOUD_TPU = "https://cloud.google.com/tpu/docs/"
_NVIDIA = "https://www.nvidia.com/en-us/data-center/"
_SPECS = "https://github.com/openxla/xla/tree/main/xla/backends/gpu/target_config/specs"


@dataclass(frozen=True, kw_only=True)
class Target:
    """One kind of device.

    Args:
        name: Its name.
        platform: `"tpu"` or `"cuda"`.
        memory_bytes: Memory of one device.
        peak_flops: Operations per second in products, by the dtype of the operands.
            It must have `"bfloat16"` and `"float32"`.
        memory_bandwidth: Bytes per second between its memory and its cores.
        link_bandwidth: Bytes per second that it sends to devices of the same host, or
            of the same slice of TPUs.
        network_bandwidth: Bytes per second that it sends to other hosts. `None` if
            links reach all devices.
        source: Where the figures come from.
        config: What XLA's GPU compiler must know, as a `GpuTargetConfigProto` in text.
            Not for TPUs.

    Raises:
        TypeError: If a text is none, or `peak_flops` is no dictionary.
        ValueError: If a figure is negative or not finite, or `platform` is neither.
    """

    name: str
    platform: Literal["tpu", "cuda"]
    memory_bytes: float
    peak_flops: Mapping[str, float]
    memory_bandwidth: float
    link_bandwidth: float
    network_bandwidth: float | None = None
    source: str
    config: str | None = None

    def __post_init__(self) -> None:
        fix = "See `armillary.plan.find_target` for those that are known."
        for name in ("name", "source", "config"):
            kind = str | None if name == "config" else str
            check_instance(name, getattr(self, name), kind, fix)
        check_one_of("platform", self.platform, ("tpu", "cuda"))
        check_instance("peak_flops", self.peak_flops, Mapping, fix)
        for name in ("memory_bytes", "memory_bandwidth", "link_bandwidth"):
            check_not_negative(name, getattr(self, name))
        if self.network_bandwidth is not None:
            check_not_negative("network_bandwidth", self.network_bandwidth)


def _tpu(
    name: str, page: str, memory: float, bf16: float, bandwidth: float, links: float
) -> Target:
    return Target(
        name=name,
        platform="tpu",
        memory_bytes=memory,
        peak_flops={"bfloat16": bf16, "float32": bf16},
        memory_bandwidth=bandwidth,
        # The figure is for both directions.
        link_bandwidth=links / 2,
        source=_CLOUD_TPU + page,
    )


class _Architecture(NamedTuple):
    """What the GPUs of one generation share."""

    capability: int  # The major number.
    links: float  # Of a device, in both directions.
    network: float  # Of its adapter: NVIDIA's own systems have one for each device.
    device: str  # Further fields of XLA's `gpu_device_info`.


_AMPERE = _Architecture(
    8,
    600e9,
    25e9,
    "shared_memory_per_core: 167936 shared_memory_per_block_optin: 166912 "
    "core_count: 108 fpus_per_core: 64 l2_cache_size: 41943040 clock_rate_ghz: 1.41",
)
_HOPPER = _Architecture(
    9,
    900e9,
    50e9,
    "shared_memory_per_core: 233472 shared_memory_per_block_optin: 232448 "
    "core_count: 132 fpus_per_core: 128 l2_cache_size: 52428800 clock_rate_ghz: 1.98",
)
_BLACKWELL = _Architecture(
    10,
    1800e9,
    50e9,
    "shared_memory_per_core: 233472 shared_memory_per_block_optin: 232448 "
    "core_count: 148 fpus_per_core: 128 l2_cache_size: 132644864 clock_rate_ghz: 1.965",
)


def _gpu(
    name: str,
    page: str,
    memory: int,
    peaks: tuple[float, float],
    bandwidth: float,
    architecture: _Architecture,
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
    return Target(
        name=name,
        platform="cuda",
        memory_bytes=memory,
        peak_flops={"bfloat16": peaks[0], "float16": peaks[0], "float32": peaks[1]},
        memory_bandwidth=bandwidth,
        link_bandwidth=architecture.links / 2,
        network_bandwidth=architecture.network,
        source=f"{_NVIDIA}{page}; {_SPECS}",
        config=config,
    )


TARGETS = {
    target.name: target
    for target in (
        _tpu("v4", "v4", 32 * 2**30, 275e12, 1228e9, 600e9),
        _tpu("v5e", "v5e", 16e9, 197e12, 819e9, 400e9),
        _tpu("v5p", "v5p", 95e9, 459e12, 2765e9, 1200e9),
        _tpu("v6e", "v6e", 32e9, 918e12, 1638e9, 800e9),
        _gpu("a100", "a100/", 85100068864, (312e12, 156e12), 2.039e12, _AMPERE),
        _gpu("h100", "h100/", 84942979072, (989e12, 494e12), 3.352e12, _HOPPER),
        _gpu("h200", "h200/", 151397597184, (989e12, 494e12), 4.8e12, _HOPPER),
        _gpu("b200", "hgx/", 191514411008, (2250e12, 1125e12), 7.672e12, _BLACKWELL),
    )
}


def find_target(name: str) -> Target:
    """Returns a known device, such as `v5e` or `h100`.

    Raises:
        ValueError: If it is not known.
    """
    if not isinstance(name, str) or name not in TARGETS:
        raise ValueError(
            f"The name {name!r} is that of no known device. Use one of "
            f"{', '.join(TARGETS)}, or describe it with "
            "`target=armillary.plan.Target(...)`."
        )
    return TARGETS[name]


_FORM = re.compile(r"([a-z0-9_.-]+):(\d+(?:x\d+)*)", re.IGNORECASE)


@dataclass(frozen=True)
class Topology:
    """Devices, and how they are connected."""

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
    """Returns the devices that a text describes."""
    text = str(topology)
    if abstract and text.isdecimal() and int(text) > 0:
        return Topology(text, target, (int(text),))
    found = _FORM.fullmatch(text)
    if found is None or not all(shape := [int(n) for n in found[2].split("x")]):
        number = ', or a number of devices such as "256"' if abstract else ""
        raise ValueError(
            f"`topology` is {topology!r}, which describes no devices. Use chips along "
            'each axis of a TPU slice, as in "v5e:16x16", or hosts by devices, as in '
            f'"h100:8x8"{number}.'
        )
    name = found[1].lower()
    kind = target or find_target(name)
    if kind.platform == "cuda" and len(shape) != 2:
        raise ValueError(
            f"`topology` is {topology!r}, but GPUs are given as hosts by devices of "
            f'each host. Write "{name}:1x{math.prod(shape)}" for one host.'
        )
    return Topology(text, kind, tuple(shape))
