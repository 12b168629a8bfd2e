"""One process of a job: its devices, its variables, its start and its end."""

import asyncio
import contextlib
import dataclasses
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from io import BufferedReader
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

from armillary._checks import counted
from armillary._launcher import SKIPPED, VARIABLE
from armillary._process import ExitCode

Say = Callable[[str], None]
_LOOPBACK = "127.0.0.1"
_PROXY_VARIABLES = ("grpc_proxy", "https_proxy", "http_proxy")
_SPOKEN_FOR = (
    ExitCode.OK,
    ExitCode.USAGE,
    ExitCode.RESTART_REQUESTED,
    ExitCode.PREEMPTED,
)
# The program that a new process runs first. It asks the kernel (1 is
# `PR_SET_PDEATHSIG`) to kill the process when the thread that started it ends, which
# also holds after `exec`. To ask between `fork` and `exec` is not safe, because Python
# would run in a copy of a program with other threads.
_TIE = """
import ctypes, os, signal, sys
has_failed = ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)
if has_failed or os.getppid() != int(sys.argv[1]):
    sys.exit("the launcher of this worker is gone, or cannot be tied to it")
pipe = f"{os.getpid()} {sys.argv[3]} {os.fstat(int(sys.argv[3])).st_ino}"
os.environ[sys.argv[2]] = pipe
os.execv(sys.argv[4], sys.argv[4:])
"""


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
    starts = range(0, num_processes * share, share)
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
        # As for CUDA, an invalid name such as -1 ends the list.
        visible = map(str.strip, environment["CUDA_VISIBLE_DEVICES"].split(","))
        return list(itertools.takewhile(lambda name: name not in {"", "-1"}, visible))
    # The folder also has files such as `nvidiactl`.
    names = [path.name.removeprefix("nvidia") for path in Path("/dev").glob("nvidia*")]
    numbers = [name for name in names if name.isdecimal()]
    return sorted(numbers, key=int)


def find_addresses(count: int) -> list[str]:
    """Returns `count` different addresses on loopback that are free now."""
    # If another program takes a port, the attempt fails, and the next has other ports.
    with contextlib.ExitStack() as stack:
        # All sockets are open together, or the system could assign a port twice.
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for connection in sockets:
            connection.bind((_LOOPBACK, 0))
        return [f"{_LOOPBACK}:{connection.getsockname()[1]}" for connection in sockets]


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
    changes = {
        "TF_CONFIG": json.dumps({"cluster": {"worker": [*addresses]}, "task": task}),
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


@dataclass(frozen=True, kw_only=True)
class Ending:
    """The end of one process: its exit code, its run time, and the cause."""

    returncode: int
    seconds: float
    loss: str = ""  # The place and the reason, if nobody saw how it ended.
    is_asked: bool = False  # True if the launcher ended it because of another process.

    @property
    def cause(self) -> ExitCode:
        """The meaning of the exit status for the job; `FAILED` if it is unknown."""
        is_known = self.returncode in _SPOKEN_FOR
        return ExitCode(self.returncode) if is_known else ExitCode.FAILED

    @property
    def is_reaction(self) -> bool:
        """True if the process ended because of something that happened elsewhere."""
        return self.cause in {ExitCode.RESTART_REQUESTED, ExitCode.PREEMPTED}

    def __str__(self) -> str:
        after = f"after {self.seconds:.1f} s"
        if self.loss:
            return f"lost {after}, {self.loss.rstrip('.')}"
        if self.returncode < 0:
            return f"killed by {name_signal(-self.returncode)} {after}"
        meaning = f" ({self.cause.name})" if self.is_reaction else ""
        return f"exit code {self.returncode}{meaning} {after}"


def name_signal(number: int) -> str:
    """Returns the name of a signal, such as `SIGKILL`; real-time ones have none."""
    return next((s.name for s in signal.Signals if s == number), f"signal {number}")


def start_tied(
    command: Sequence[str], environment: Mapping[str, str], folder: str
) -> "tuple[subprocess.Popen[bytes], BufferedReader]":
    """Starts a process that ends with the calling thread, in a group of its own.

    Returns:
        The process, and the pipe with its messages for the launcher.
    """
    reader, writer = os.pipe()
    # If the launcher is stopped, the process drops messages and does not wait.
    os.set_blocking(writer, False)
    told = os.fdopen(reader, "rb")
    tie = [_TIE, str(os.getpid()), VARIABLE, str(writer)]
    try:
        # The terminal does not send Ctrl-C to the group; the launcher passes it on.
        # Programs that the process itself has started end with the group.
        process = subprocess.Popen(
            # The first program does not need `site` and the folder of the script.
            [sys.executable, "-S", "-P", "-c", *tie, *command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=folder,
            env=dict(environment),
            start_new_session=True,
            pass_fds=(writer,),
        )
    except OSError:
        told.close()
        raise
    finally:
        os.close(writer)
    return process, told


def end_group(process: "subprocess.Popen[bytes]") -> int:
    """Ends a process and the rest of its group; returns its exit code."""
    # ORDER: the group is killed before the wait, because after it another process may
    # have the number. After `sudo`, the rest of a group may belong to another user.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    return process.wait()


class LaunchedProcess(ABC):
    """A running process of a job, below a running event loop."""

    stdout: BufferedReader
    stderr: BufferedReader
    line: BufferedReader  # The messages of the process for the launcher.

    def __init__(self, label: str) -> None:
        self.label = label
        self.is_asked = False  # True if the launcher ends it.
        # The first value of the last message with each word.
        self.told: dict[str, Any] = {}
        self.ended: asyncio.Future[Ending] = asyncio.get_running_loop().create_future()
        self.silent: asyncio.Future[None] = self.ended.get_loop().create_future()
        self._since = time.monotonic()

    @property
    def is_joining(self) -> bool:
        """True while the process waits for the other workers to join."""
        return "joining" in self.told and "joined" not in self.told

    def listen(self, receive: Callable[..., None]) -> None:
        """Keeps the messages of the process, and calls `receive` with each of them."""
        loop = self.ended.get_loop()

        def note(word: str, *values: Any) -> None:
            self.told[word] = values[0] if values else True
            receive(word, *values)

        def read() -> None:
            # The event loop of the launcher may have ended meanwhile.
            with contextlib.suppress(RuntimeError), self.line:
                for line in self.line:
                    loop.call_soon_threadsafe(note, *json.loads(line))
                loop.call_soon_threadsafe(self.silent.set_result, None)

        threading.Thread(target=read, daemon=True).start()

    @abstractmethod
    def kill(self) -> None:
        """Ends the process, if it runs; `ended` is set after that."""

    @abstractmethod
    def send_signal(self, number: int) -> None:
        """Sends a signal to the process, if it runs, but not to its own children."""

    def _end(self, code: int, loss: str = "", seconds: float | None = None) -> None:
        if self.ended.done():
            return
        if seconds is None:
            seconds = time.monotonic() - self._since
        ending = Ending(
            returncode=code, seconds=seconds, loss=loss, is_asked=self.is_asked
        )
        self.ended.set_result(ending)


class Child(LaunchedProcess):
    """A process on this machine.

    Raises:
        OSError: If the system does not start another process.
    """

    def __init__(
        self, label: str, arguments: Sequence[str], environment: Mapping[str, str]
    ) -> None:
        super().__init__(label)
        command = [sys.executable, *arguments]
        self._process, self.line = start_tied(command, environment, os.getcwd())
        self.stdout = cast("BufferedReader", self._process.stdout)
        self.stderr = cast("BufferedReader", self._process.stderr)
        loop = asyncio.get_running_loop()
        threading.Thread(target=self._watch, args=(loop,), daemon=True).start()

    def kill(self) -> None:
        if not self.ended.done():
            self._end(end_group(self._process))

    def send_signal(self, number: int) -> None:
        if not self.ended.done():
            os.kill(self._process.pid, number)

    def _watch(self, loop: asyncio.AbstractEventLoop) -> None:
        # If the process was killed meanwhile, its end is already known.
        with contextlib.suppress(ChildProcessError, RuntimeError):
            os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOWAIT)
            loop.call_soon_threadsafe(self.kill)


class Machines:
    """The machine of the launcher, which has a place for every worker."""

    def __init__(
        self,
        num_workers: int,
        devices: DevicePlan,
        fewest: int | None = None,
        wait_seconds: float = 0.0,
    ) -> None:
        self._num_workers = num_workers
        self.devices = devices
        self._fewest = fewest or num_workers
        self._wait_seconds = wait_seconds
        self._all_gpus = devices.gpus
        # The places whose worker did not come, with the time when that began.
        self._away: dict[int, float] = {}
        self._places: list[int] = []
        self._has_waited_enough = False
        self._cache: TemporaryDirectory[str] | None = None

    async def reserve(self, say: Say) -> tuple[list[str], str]:
        """Finds a place for each worker of an attempt.

        Returns:
            Their addresses, and the end of the message about the start.
        """
        # After an attempt without some of the places, the next one uses all again.
        away = self._away if self._has_waited_enough else {}
        self._has_waited_enough = False
        self._places = [i for i in range(self._num_workers) if i not in away]
        if self._all_gpus:
            chosen = [self._all_gpus[place] for place in self._places]
            # The evaluator has the GPUs that come after the GPUs of all workers.
            chosen += self._all_gpus[self._num_workers :]
            self.devices = dataclasses.replace(self.devices, gpus=tuple(chosen))
        return find_addresses(len(self._places)), ""

    def note_missing(self, indices: Collection[int]) -> str:
        """Notes that workers did not come; returns a message about the next attempt.

        The message is empty if the job cannot continue without them.
        """
        now = time.monotonic()
        for index in indices:
            self._away.setdefault(self._places[index], now)
        left = self._num_workers - len(self._away)
        if left < self._fewest:
            self._away.clear()
            return ""
        who = f"{len(self._away)} of {self._num_workers} workers did not come"
        waited_seconds = now - min(self._away.values(), default=now)
        seconds_left = self._wait_seconds - waited_seconds
        self._has_waited_enough = seconds_left <= 0
        if self._has_waited_enough:
            return f"{who}, so it continues with {left}"
        return f"{who}, and may for {seconds_left:.0f} s more"

    def note_present(self, index: int) -> None:
        """Notes that a worker has come."""
        self._away.pop(self._places[index], None)

    def start(
        self,
        label: str,
        index: int | None,
        arguments: Sequence[str],
        environment: Mapping[str, str],
    ) -> LaunchedProcess:
        """Starts worker `index`, or the evaluator."""
        return Child(label, arguments, self._with_cache(environment))

    def release(self) -> None:
        """Gives the machines back, with everything that runs there."""

    def _with_cache(self, environment: Mapping[str, str]) -> Mapping[str, str]:
        """Adds a folder for compiled programs that all attempts share.

        A folder that the user has chosen stays.
        """
        if environment.get("JAX_COMPILATION_CACHE_DIR"):
            return environment
        if self._cache is None:
            prefix = "armillary-compiled-"
            self._cache = TemporaryDirectory(prefix=prefix, ignore_cleanup_errors=True)
        return {
            **environment,
            "JAX_COMPILATION_CACHE_DIR": self._cache.name,
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        }

    def close(self) -> None:
        """Ends all use of the machines, after the last attempt."""
        if self._cache is not None:
            self._cache.cleanup()
