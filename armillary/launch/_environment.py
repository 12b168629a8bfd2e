"""The environment variables of a worker, and the addresses in them.

Which devices of this machine each worker may use, found without touching one.
"""

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

_GPU_FILE = re.compile(r"nvidia\d+")


@dataclass(frozen=True, kw_only=True)
class DevicePlan:
    """The devices of each process.

    Args:
        virtual_cpus: Number of virtual CPU devices of each one, or `None` to leave
            it to the script.
        gpus: The names of each one's GPUs, for `CUDA_VISIBLE_DEVICES`; empty on a
            machine whose GPUs are not used.
        num_gpus: Number of GPUs of each one, where Ray chooses which ones.
    """

    virtual_cpus: int | None = None
    gpus: tuple[tuple[str, ...], ...] = ()
    num_gpus: int = 0

    def describe(self) -> str:
        """Returns what each worker has, for the first line of a job."""
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
    num_processes = num_workers + has_evaluator
    share = devices_per_worker or len(gpus) // num_processes or 1
    if num_processes * share > len(gpus):
        beside = " with an `--evaluator`" if has_evaluator else ""
        raise ValueError(
            f"`--workers` is {num_workers}{beside} and `--devices-per-worker` is "
            f"{share}, which takes {num_processes * share} GPUs, but this machine "
            f"offers {len(gpus)} ({', '.join(gpus)}). Use fewer, or set "
            "`JAX_PLATFORMS=cpu` to run on virtual CPU devices."
        )
    return DevicePlan(
        gpus=tuple(
            tuple(gpus[index * share : (index + 1) * share])
            for index in range(num_processes)
        )
    )


def can_use_gpus(environment: Mapping[str, str]) -> bool:
    """Returns whether JAX would use NVIDIA GPUs, if there were any."""
    platforms = environment.get("JAX_PLATFORMS", "")
    if platforms and not {"cuda", "gpu"} & set(platforms.split(",")):
        return False
    return any("cuda" in plugin.name for plugin in entry_points(group="jax_plugins"))


def find_gpus(environment: Mapping[str, str]) -> list[str]:
    """Returns the names of the NVIDIA GPUs that JAX would use in `environment`."""
    if not can_use_gpus(environment):
        return []
    if "CUDA_VISIBLE_DEVICES" in environment:
        return read_visible_gpus(environment["CUDA_VISIBLE_DEVICES"])
    files = [path.name for path in Path("/dev").glob("nvidia*")]
    numbers = [name[len("nvidia") :] for name in files if _GPU_FILE.fullmatch(name)]
    return sorted(numbers, key=int)


def read_visible_gpus(value: str) -> list[str]:
    """Returns the names in a value of `CUDA_VISIBLE_DEVICES`.

    CUDA takes the names in front of the first one that is not valid, so `-1` ends the
    list.
    """
    names = (name.strip() for name in value.split(","))
    return list(itertools.takewhile(lambda name: name not in {"", "-1"}, names))


_DEVICE_COUNT_FLAG = "--xla_force_host_platform_device_count"
_LOOPBACK = "127.0.0.1"
_PROXY_VARIABLES = ("grpc_proxy", "https_proxy", "http_proxy")


def check_environment(environment: Mapping[str, str]) -> None:
    """Raises if the launcher itself is a worker already."""
    if environment.get("TF_CONFIG", "").strip():
        raise ValueError(
            f"`TF_CONFIG` is {environment['TF_CONFIG']!r}, so this process is a worker "
            "of a job already, but `armillary launch` sets it for workers of its own. "
            "Run the script itself (`python train.py`), or `unset TF_CONFIG` first."
        )


def find_addresses(count: int) -> list[str]:
    """Returns `count` different addresses on loopback that are free now.

    Nothing holds them after the return, so another program can take one before the
    worker does. That attempt fails, and the next one has other ports.
    """
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
    """Returns the environment of one worker, or of the evaluator."""
    task = {"type": "worker", "index": index}
    if index is None:
        task = {"type": "evaluator", "index": 0}
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
    environment = {**base, **changes}
    if devices.gpus:
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(
            devices.gpus[-1 if index is None else index]
        )
    elif devices.virtual_cpus is not None:
        flags = [
            flag
            for flag in base.get("XLA_FLAGS", "").split()
            if flag.partition("=")[0] != _DEVICE_COUNT_FLAG
        ]
        flags.append(f"{_DEVICE_COUNT_FLAG}={devices.virtual_cpus}")
        environment["XLA_FLAGS"] = " ".join(flags)
        # JAX prefers this one to the flag.
        environment.pop("JAX_NUM_CPU_DEVICES", None)
    return environment
