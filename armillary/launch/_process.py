"""One process of a job, a worker or the evaluator; here, on the launcher's machine."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from io import BufferedReader
from typing import cast

from armillary._process import ExitCode
from armillary.launch import _exec
from armillary.launch._environment import find_addresses

Say = Callable[[str], None]
_SPOKEN_FOR = (ExitCode.USAGE, ExitCode.RESTART_REQUESTED, ExitCode.PREEMPTED)


@dataclass(frozen=True, kw_only=True)
class Ending:
    """How one process ended."""

    returncode: int
    seconds: float
    loss: str = ""  # Where and why, if nobody saw how it ended.

    @property
    def cause(self) -> ExitCode:
        """What the end means for the job; `FAILED` if nothing more is known."""
        if self.returncode == 0:
            return ExitCode.OK
        if self.returncode in _SPOKEN_FOR:
            return ExitCode(self.returncode)
        return ExitCode.FAILED

    @property
    def is_reaction(self) -> bool:
        """Whether the process ended because of something that happened elsewhere."""
        return self.cause in {ExitCode.RESTART_REQUESTED, ExitCode.PREEMPTED}

    def __str__(self) -> str:
        if self.loss:
            return f"lost after {self.seconds:.1f} s, {self.loss.rstrip('.')}"
        if self.returncode < 0:
            way = f"killed by {name_signal(-self.returncode)}"
        else:
            way = f"exit code {self.returncode}"
        if self.is_reaction:
            way += f" ({self.cause.name})"
        return f"{way} after {self.seconds:.1f} s"


def name_signal(number: int) -> str:
    """Returns the name of a signal, such as `SIGKILL`; real-time ones have none."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def start_tied(
    exec_path: str,
    command: Sequence[str],
    environment: Mapping[str, str],
    folder: str,
) -> "subprocess.Popen[bytes]":
    """Starts a process that ends with the calling thread, in a group of its own."""
    # The group keeps the terminal's Ctrl-C away, which the launcher passes on instead,
    # and lets what the process itself started end with it.
    return subprocess.Popen(
        # For the first moment without `site` and the folder of `_exec.py`.
        [sys.executable, "-S", "-P", exec_path, str(os.getpid()), *command],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=folder,
        env=dict(environment),
        start_new_session=True,
    )


def end_group(process: "subprocess.Popen[bytes]") -> int:
    """Ends a process, and what is left of its group; returns its exit code."""
    # ORDER: before the process is waited for, its number cannot be another's. What is
    # left of a group may also be another user's, after `sudo`.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    return process.wait()


class Process(ABC):
    """A running process of a job, below a running event loop."""

    stdout: BufferedReader
    stderr: BufferedReader

    def __init__(self, label: str) -> None:
        self.label = label
        self.ended: asyncio.Future[Ending] = asyncio.get_running_loop().create_future()
        self._since = time.monotonic()

    @abstractmethod
    def kill(self) -> None:
        """Ends the process, if it runs; `ended` is set after that."""

    @abstractmethod
    def send_signal(self, number: int) -> None:
        """Sends a signal to the process, if it runs, but not to its own children."""

    def _end(self, code: int, loss: str = "", seconds: float | None = None) -> None:
        if not self.ended.done():
            seconds = time.monotonic() - self._since if seconds is None else seconds
            self.ended.set_result(Ending(returncode=code, seconds=seconds, loss=loss))


class Child(Process):
    """A process here; `OSError` if the system does not start another one."""

    def __init__(
        self, label: str, arguments: Sequence[str], environment: Mapping[str, str]
    ) -> None:
        super().__init__(label)
        command = [sys.executable, *arguments]
        self._process = start_tied(_exec.__file__, command, environment, os.getcwd())
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
        # Where it was killed meanwhile, nobody waits any more.
        with contextlib.suppress(ChildProcessError, RuntimeError):
            os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOWAIT)
            loop.call_soon_threadsafe(self.kill)


class ThisMachine:
    """The machine of the launcher, which has a place for every worker."""

    def __init__(self, num_workers: int) -> None:
        self._num_workers = num_workers

    async def reserve(self, say: Say) -> list[str]:
        """Finds a place for each worker of an attempt; returns their addresses."""
        del say
        return find_addresses(self._num_workers)

    def describe(self) -> str:
        """Returns where the reserved places are, or nothing if that is clear."""
        return ""

    def start(
        self,
        label: str,
        index: int | None,
        arguments: Sequence[str],
        environment: Mapping[str, str],
    ) -> Process:
        """Starts worker `index`, or the evaluator."""
        del index
        return Child(label, arguments, environment)

    def release(self) -> None:
        """Gives the places back, with whatever runs there."""

    def close(self) -> None:
        """Ends all use of the machines, after the last attempt."""
