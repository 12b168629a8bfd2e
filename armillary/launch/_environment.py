"""What a worker finds: its devices, its place among the others, and its variables."""

import contextlib
import itertools
import json
import re
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path

from armillary._checks import counted

_DEVICE_COUNT_FLAG = "--xla_force_host_platform_device_count"
_LOOPBACK = "127.0.0.1"
_PROXY_VARIABLES = ("grpc_proxy", "https_proxy", "http_proxy")


@dataclass(frozen=True, kw_only=True)
class DevicePlan:
    """The devices of each process."""

    virtual_cpus: int | None = None  # `None` leaves it to the script.
    gpus: tuple[tuple[str, ...], ...] = ()  # Names, for `CUDA_VISIBLE_DEVICES`.
    num_gpus: int = 0  # Where Ray chooses which ones.

    def __str__(self) -> str:
        if num_gpus := self.num_gpus or (len(self.gpus[0]) if self.gpus else 0):
            return f"{counted(num_gpus, 'GPU')} each"
        if self.virtual_cpus is not None:
            return f"{counted(self.virtual_cpus, 'virtual CPU device')} each"
        return "devices as the script finds them"


def plan_devices(
    gpus: Sequence[str],
    *,
    num_workers: int,
    devices_per_worker: int | None,
    has_evaluator: bool = False,
) -> DevicePlan:
    """Shares the GPUs, or plans virtual CPU devices where there is none."""
    if not gpus:
        return DevicePlan(virtual_cpus=devices_per_worker)
    count = num_workers + has_evaluator
    share = devices_per_worker or len(gpus) // count or 1
    if count * share > len(gpus):
        beside = " with an `--evaluator`" if has_evaluator else ""
        raise ValueError(
            f"`--workers` is {num_workers}{beside} and `--devices-per-worker` is "
            f"{share}, which takes {count * share} GPUs, but this machine offers "
            f"{len(gpus)} ({', '.join(gpus)}). Use fewer, or set `JAX_PLATFORMS=cpu` "
            "to run on virtual CPU devices."
        )
    starts = range(0, count * share, share)
    return DevicePlan(gpus=tuple(tuple(gpus[i : i + share]) for i in starts))


def can_use_gpus(environment: Mapping[str, str]) -> bool:
    """Returns whether JAX would use NVIDIA GPUs, if there were any."""
    platforms = environment.get("JAX_PLATFORMS", "")
    if platforms and not {"cuda", "gpu"} & set(platforms.split(",")):
        return False
    return any("cuda" in plugin.name for plugin in entry_points(group="jax_plugins"))


def find_gpus(environment: Mapping[str, str]) -> list[str]:
    """Returns the names of the NVIDIA GPUs that JAX would use, without touching one."""
    if not can_use_gpus(environment):
        return []
    if "CUDA_VISIBLE_DEVICES" in environment:
        # As CUDA reads it: a name that is none, such as -1, ends the list.
        names = map(str.strip, environment["CUDA_VISIBLE_DEVICES"].split(","))
        return list(itertools.takewhile(lambda name: name not in {"", "-1"}, names))
    files = (path.name for path in Path("/dev").glob("nvidia*"))
    found = (re.fullmatch(r"nvidia(\d+)", name) for name in files)
    return sorted((match[1] for match in found if match), key=int)


def find_addresses(count: int) -> list[str]:
    """Returns `count` different addresses on loopback that are free now."""
    # Another program can take one before the worker does: that attempt fails, and the
    # next one has other ports.
    with contextlib.ExitStack() as stack:
        # All are open at once, or the system could give the same one twice.
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind((_LOOPBACK, 0))
        return [f"{_LOOPBACK}:{each.getsockname()[1]}" for each in sockets]


def make_environment(
    base: Mapping[str, str],
    *,
    addresses: Sequence[str],
    index: int | None,
    devices: DevicePlan,
    num_restarts: int,
) -> dict[str, str]:
    """Returns the environment of one worker, or of the evaluator (index `None`)."""
    is_worker = index is not None
    task = {"type": "worker" if is_worker else "evaluator", "index": index or 0}
    changes = {
        "TF_CONFIG": json.dumps({"cluster": {"worker": [*addresses]}, "task": task}),
        "ARMILLARY_RESTART_COUNT": str(num_restarts),
        # JAX would listen on all interfaces of the machine.
        "JAX_COORDINATOR_BIND_ADDRESS": addresses[0],
        # Output goes to a pipe, where Python would hold back whole pages of it.
        "PYTHONUNBUFFERED": base.get("PYTHONUNBUFFERED") or "1",
    }
    if any(base.get(name) for name in _PROXY_VARIABLES):
        # gRPC would ask the proxy for the coordinator.
        direct = base.get("no_grpc_proxy") or base.get("no_proxy")
        hosts = dict.fromkeys(address.rpartition(":")[0] for address in addresses)
        changes["no_grpc_proxy"] = ",".join([*([direct] if direct else []), *hosts])
    if devices.gpus:
        gpus = devices.gpus[index if is_worker else -1]
        changes["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
    elif devices.virtual_cpus is not None:
        flags = base.get("XLA_FLAGS", "").split()
        kept = [each for each in flags if not each.startswith(f"{_DEVICE_COUNT_FLAG}=")]
        count = f"{_DEVICE_COUNT_FLAG}={devices.virtual_cpus}"
        changes["XLA_FLAGS"] = " ".join([*kept, count])
        # JAX prefers this one to the flag.
        base = {key: base[key] for key in base if key != "JAX_NUM_CPU_DEVICES"}
    return {**base, **changes}
