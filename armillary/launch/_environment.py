"""The environment of a process of a job: its devices, address and variables."""

import contextlib
import json
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path

from armillary._checks import counted
from armillary._launcher import SKIPPED

_LOOPBACK = "127.0.0.1"
_PROXY_VARIABLES = ("grpc_proxy", "https_proxy", "http_proxy")


@dataclass(frozen=True, kw_only=True)
class DevicePlan:
    """The devices of each process."""

    virtual_cpus: int | None = None  # `None` leaves it to the script.
    gpus: tuple[tuple[str, ...], ...] = ()  # Names, for `CUDA_VISIBLE_DEVICES`.
    num_gpus: int = 0  # Only their number, if Ray chooses them.

    def __str__(self) -> str:
        num_gpus = self.num_gpus
        if self.gpus:
            num_gpus = num_gpus or len(self.gpus[0])
        if num_gpus:
            return f"{counted(num_gpus, 'GPU')} each"
        if self.virtual_cpus is not None:
            return f"{counted(self.virtual_cpus, 'virtual CPU device')} each"
        return "devices as the script finds them"


def plan_devices(
    gpus: Sequence[str], num_processes: int, share: int | None
) -> DevicePlan:
    """Divides the GPUs, or plans virtual CPU devices if there are no GPUs."""
    if not gpus:
        return DevicePlan(virtual_cpus=share)
    share = share or len(gpus) // num_processes or 1
    if num_processes * share > len(gpus):
        raise ValueError(
            f"the job has {num_processes} processes, with the evaluator, and "
            f"`--devices-per-worker` is {share}, but this machine offers {len(gpus)} "
            f"GPUs ({', '.join(gpus)}). Use fewer, or set `JAX_PLATFORMS=cpu` to run "
            "on virtual CPU devices."
        )
    by_process: list[tuple[str, ...]] = []
    for process in range(num_processes):
        start = process * share
        by_process.append(tuple(gpus[start : start + share]))
    return DevicePlan(gpus=tuple(by_process))


def can_use_gpus(environment: Mapping[str, str]) -> bool:
    """Returns whether JAX would use NVIDIA GPUs, if there were any."""
    platforms = environment.get("JAX_PLATFORMS", "")
    allows_gpus = not {"cuda", "gpu"}.isdisjoint(platforms.split(","))
    if platforms and not allows_gpus:
        return False
    plugins = entry_points(group="jax_plugins")
    return any("cuda" in plugin.name for plugin in plugins)


def find_gpus(environment: Mapping[str, str]) -> list[str]:
    """Returns the names of the NVIDIA GPUs that JAX would use, without touching one."""
    if not can_use_gpus(environment):
        return []
    if "CUDA_VISIBLE_DEVICES" in environment:
        found: list[str] = []
        for text in environment["CUDA_VISIBLE_DEVICES"].split(","):
            name = text.strip()
            # As for CUDA, an invalid name such as -1 ends the list.
            if name in {"", "-1"}:
                break
            found.append(name)
        return found

    # The folder also has files such as `nvidiactl`.
    names = [path.name.removeprefix("nvidia") for path in Path("/dev").glob("nvidia*")]
    numbers = [name for name in names if name.isdecimal()]
    return sorted(numbers, key=int)


def find_addresses(count: int) -> list[str]:
    """Returns `count` different addresses on loopback that are free now."""
    # If another program takes a port, the attempt fails, and the next has other ports.
    addresses: list[str] = []
    with contextlib.ExitStack() as stack:
        # All sockets are open together, or the system could assign a port twice.
        for _ in range(count):
            connection = stack.enter_context(socket.socket())
            connection.bind((_LOOPBACK, 0))
            _, port = connection.getsockname()
            addresses.append(f"{_LOOPBACK}:{port}")
    return addresses


def make_environment(
    base: Mapping[str, str],
    *,
    addresses: Sequence[str],
    index: int | None,
    devices: DevicePlan,
    num_restarts: int,
    skipped: str = "",
) -> dict[str, str]:
    """Returns the environment of one worker, or of the evaluator (index `None`)."""
    is_worker = index is not None
    task = {"type": "worker" if is_worker else "evaluator", "index": index or 0}
    tf_config = {"cluster": {"worker": [*addresses]}, "task": task}
    changes = {
        "TF_CONFIG": json.dumps(tf_config),
        "ARMILLARY_RESTART_COUNT": str(num_restarts),
        SKIPPED: skipped,
        # By default, JAX would listen on all interfaces of the machine.
        "JAX_COORDINATOR_BIND_ADDRESS": addresses[0],
        # Output goes to a pipe, and by default Python buffers the output to a pipe.
        "PYTHONUNBUFFERED": base.get("PYTHONUNBUFFERED") or "1",
        # The stack is shown if a process crashes, or is ended before it has joined.
        "PYTHONFAULTHANDLER": base.get("PYTHONFAULTHANDLER") or "1",
    }
    if any(base.get(name) for name in _PROXY_VARIABLES):
        # By default, gRPC would connect to the coordinator through the proxy.
        changes["no_grpc_proxy"] = _without_proxy(base, addresses)
    if devices.gpus:
        # The evaluator has the last ones.
        gpus = devices.gpus[index if is_worker else -1]
        changes["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
    elif devices.virtual_cpus is not None:
        changes["JAX_NUM_CPU_DEVICES"] = str(devices.virtual_cpus)
    return {**base, **changes}


def _without_proxy(base: Mapping[str, str], addresses: Sequence[str]) -> str:
    """Returns the hosts that gRPC reaches directly: the user's, and the workers'."""
    names: list[str] = []
    users = base.get("no_grpc_proxy") or base.get("no_proxy")
    if users:
        names.append(users)
    hosts = [address.rpartition(":")[0] for address in addresses]
    names += dict.fromkeys(hosts)
    return ",".join(names)
