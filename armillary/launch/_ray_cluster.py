"""A Ray cluster to launch on: connecting to it, and what it has room for."""

import contextlib
import os
import signal
import socket
import types
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from armillary.cluster._ray import import_ray
from armillary.launch._device_plan import DevicePlan, can_use_gpus

_PROBE_SECONDS = 10.0
_CONNECT_SECONDS = 20.0


def connect(address: str) -> Any:
    """Connects to a cluster and returns the package `ray`."""
    host, colon, port = address.rpartition(":")
    if not (host and colon and port.isdecimal()) or "/" in address:
        raise ValueError(
            f"`--ray` is {address!r}, but it must be HOST:PORT of the head of a Ray "
            "cluster, as `ray start --head` prints it. Use, for example, "
            "`--ray 10.0.0.1:6379`, on a machine of the cluster."
        )
    try:
        ray = import_ray()
    except ImportError as error:
        raise ValueError(f"`--ray` is {address!r}, but {error}") from error
    # Ray itself would try for a quarter of an hour.
    try:
        socket.create_connection((host, int(port)), _PROBE_SECONDS).close()
    except (OSError, OverflowError) as error:
        raise ValueError(
            f"`--ray` is {address!r}, but nothing answers there ({error}). Start Ray "
            "(`ray start --head`), or use the address that it printed."
        ) from error
    try:
        with _time_limit(_CONNECT_SECONDS):
            ray.init(address=address, log_to_driver=False, logging_level="WARNING")
    except (_TooLateError, Exception) as error:
        reason = str(error).strip().partition("\n")[0]
        raise ValueError(
            f"`--ray` is {address!r}, but the launcher cannot join a cluster there: "
            f"{reason or type(error).__name__} Use the address of Ray's head, not of "
            "its dashboard, and run the launcher on a machine of the cluster, with its "
            "versions of Ray and Python, and its token (`RAY_AUTH_TOKEN`)."
        ) from error
    return ray


class _TooLateError(BaseException):
    """The time is over. Ray catches every `Exception`, and tries again."""


@contextlib.contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    def end(number: int, frame: types.FrameType | None) -> None:
        del number, frame
        raise _TooLateError(f"nothing that speaks as Ray does in {seconds:g} s.")

    before = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@dataclass(frozen=True, kw_only=True)
class Bundle:
    """What one worker takes of a machine.

    Args:
        num_gpus: GPUs of each worker, 0 if it computes on CPUs.
    """

    num_gpus: int = 0

    @property
    def resources(self) -> dict[str, float]:
        """What Ray reserves."""
        return {"CPU": 1, "GPU": self.num_gpus} if self.num_gpus else {"CPU": 1}

    @property
    def strategy(self) -> str:
        """How Ray spreads the workers.

        On few machines, where they have GPUs of their own and are connected best. Else
        on many: every worker computes on all cores of its machine.
        """
        return "PACK" if self.num_gpus else "SPREAD"

    def count_in(self, machines: Iterable[Mapping[str, float]]) -> int:
        """Returns for how many workers machines have room, by their resources."""
        return sum(
            int(min(have.get(name, 0) // need for name, need in self.resources.items()))
            for have in machines
        )

    def __str__(self) -> str:
        gpus = f" and {self.num_gpus} GPU{'s' if self.num_gpus > 1 else ''}"
        return f"1 CPU{gpus if self.num_gpus else ''}"


def find_machines(ray: Any) -> list[dict[str, float]]:
    """Returns the resources of each machine that lives, whoever uses them."""
    return [node["Resources"] for node in ray.nodes() if node["Alive"]]


def plan_bundle(
    machines: Iterable[Mapping[str, float]], devices_per_worker: int | None
) -> tuple[Bundle, DevicePlan]:
    """Returns what each worker takes, and its devices."""
    has_gpus = any(machine.get("GPU") for machine in machines)
    if has_gpus and can_use_gpus(os.environ):
        num_gpus = devices_per_worker or 1
        return Bundle(num_gpus=num_gpus), DevicePlan(num_gpus=num_gpus)
    return Bundle(), DevicePlan(virtual_cpus=devices_per_worker)
