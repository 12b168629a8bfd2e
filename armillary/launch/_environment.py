"""The environment variables of a worker, and the addresses in them."""

import contextlib
import json
import socket
from collections.abc import Mapping, Sequence

from armillary.launch._device_plan import DevicePlan

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
