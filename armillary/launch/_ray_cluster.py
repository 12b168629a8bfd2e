"""A Ray cluster to launch on: connecting to it, and what it has room for.

What runs beside a worker on a machine of a Ray cluster: its parent process.

Ray sends this class to the machine as a value, so that nothing but the standard library
is imported there.
"""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from armillary._optional import import_ray
from armillary.launch._environment import DevicePlan, can_use_gpus

_READ_SIZE = 64 * 1024
_OF_THE_MACHINE = ("CUDA_VISIBLE_DEVICES", "HOSTNAME")


class Host:
    """Starts one worker, passes on what it says, and ends with it; an actor of Ray.

    Its methods run in one thread, that of its event loop, which lives as long as the
    actor does. So the kernel ends the worker with the actor: see `_exec.py`.
    """

    def __init__(self) -> None:
        self._socket = socket.socket()
        self._is_running = False
        # Ray may begin a call before an earlier one.
        self._has_started = asyncio.Event()

    async def prepare(self, paths: Sequence[str]) -> tuple[str, str, int, str]:
        """Looks at the machine, and whether it has some paths."""
        import ray

        address = ray.util.get_node_ip_address()
        self._socket.bind((address, 0))
        port = self._socket.getsockname()[1]
        missing = [path for path in paths if not os.path.exists(path)]
        return address, socket.gethostname(), port, missing[0] if missing else ""

    async def start(
        self,
        exec_path: str,
        command: Sequence[str],
        environment: Mapping[str, str],
        folder: str,
    ) -> None:
        """Starts the worker, by `_exec.py`, in the environment of the launcher.

        A few of its variables are the machine's own.
        """
        here = {name: os.environ.get(name) for name in _OF_THE_MACHINE}
        own = {name: value for name, value in here.items() if value is not None}
        self._socket.close()
        self._start = time.monotonic()
        self._process = subprocess.Popen(
            [sys.executable, "-S", "-P", exec_path, str(os.getpid()), *command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            cwd=folder,
            env={**environment, **own},
            start_new_session=True,
        )
        self._is_running = True
        self._has_started.set()

    async def read(self, name: str) -> bytes:
        """Returns what the worker says next on `stdout` or `stderr`; b"" at the end."""
        await self._has_started.wait()
        stream = getattr(self._process, name)
        return await asyncio.to_thread(os.read, stream.fileno(), _READ_SIZE)

    async def wait(self) -> tuple[int, float]:
        """Returns the exit code of the worker, as Python has it, and its seconds."""
        await self._has_started.wait()
        pid = self._process.pid
        await asyncio.to_thread(os.waitid, os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        # ORDER: before the process is waited for, its number cannot be another's.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)
        self._is_running = False
        return self._process.wait(), time.monotonic() - self._start

    async def send_signal(self, number: int) -> None:
        """Sends a signal to the worker alone, if it runs."""
        if self._is_running:
            os.kill(self._process.pid, number)


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
