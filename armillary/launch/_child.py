"""One process of a job, a worker or the evaluator; here, on the launcher's machine.

Where the processes of a job run; here, the machine of the launcher.
"""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from io import FileIO
from pathlib import Path
from typing import cast

from armillary.launch._environment import find_addresses
from armillary.launch._outcome import Ending
from armillary.launch._output import Stream

_EXEC = str(Path(__file__).with_name("_exec.py"))


class Process(ABC):
    """A running process of a job, below a running event loop.

    Args:
        label: Its name, such as `worker 0`.

    Attributes:
        ended: How it ended, once it has.
        stdout, stderr: What it says.
    """

    stdout: FileIO | Stream
    stderr: FileIO | Stream

    def __init__(self, label: str) -> None:
        self.label = label
        self.ended: asyncio.Future[Ending] = asyncio.get_running_loop().create_future()
        self._start = time.monotonic()

    @abstractmethod
    def look(self) -> None:
        """Sets `ended` if the process has ended; called at each SIGCHLD."""

    @abstractmethod
    def kill(self) -> None:
        """Ends the process, if it runs; `ended` is set after that."""

    @abstractmethod
    def send_signal(self, number: int) -> None:
        """Sends a signal to the process alone, if it runs.

        Its own children do not get it: they have to work for as long as it needs to
        save.
        """

    def _end(
        self, returncode: int, loss: str = "", *, seconds: float | None = None
    ) -> None:
        if seconds is None:
            seconds = time.monotonic() - self._start
        if not self.ended.done():
            ending = Ending(returncode=returncode, seconds=seconds, loss=loss)
            self.ended.set_result(ending)


class Child(Process):
    """A process here, leader of a group of its own, whose streams are not buffered.

    A group of its own keeps the terminal's Ctrl-C away, which the launcher passes on
    instead, and lets the processes that the child itself started end with it.

    It must be constructed in the thread that lives longest, because the kernel ends the
    child together with that thread.

    Raises:
        OSError: If the system does not start another process.
    """

    def __init__(
        self, label: str, arguments: Sequence[str], environment: Mapping[str, str]
    ) -> None:
        super().__init__(label)
        # Without `site` and the folder of `_exec.py` on the path, for the first moment.
        tied = [sys.executable, "-S", "-P", _EXEC, str(os.getpid())]
        self._process = subprocess.Popen(
            [*tied, sys.executable, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            env=dict(environment),
            start_new_session=True,
        )
        self.stdout = cast("FileIO", self._process.stdout)
        self.stderr = cast("FileIO", self._process.stderr)

    def look(self) -> None:
        flags = os.WEXITED | os.WNOHANG | os.WNOWAIT
        if not self.ended.done() and os.waitid(os.P_PID, self._process.pid, flags):
            self.kill()

    def kill(self) -> None:
        """Ends the process, if it runs, and what is left of its group."""
        if self.ended.done():
            return
        # ORDER: before the process is waited for, its number cannot be another's. What
        # is left of a group may also be another user's, after `sudo`.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._end(self._process.wait())

    def send_signal(self, number: int) -> None:
        if not self.ended.done():
            os.kill(self._process.pid, number)


Say = Callable[[str], None]


class Machines(ABC):
    """The machines on which the workers of one attempt run, then those of the next."""

    @abstractmethod
    async def reserve(self, say: Say, is_ending: asyncio.Event) -> list[str]:
        """Finds a place for each worker; returns their addresses, by index."""

    def describe(self) -> str:
        """Returns where the reserved places are, or nothing if that is clear."""
        return ""

    @abstractmethod
    def start(
        self,
        label: str,
        index: int | None,
        arguments: Sequence[str],
        environment: Mapping[str, str],
    ) -> Process:
        """Starts worker `index`, or the evaluator, below a running event loop."""

    def release(self) -> None:
        """Gives the places back, with whatever runs there."""
        return

    def close(self) -> None:
        """Ends all use of the machines, after the last attempt."""
        return


class ThisMachine(Machines):
    """The machine of the launcher, which has a place for every worker."""

    def __init__(self, num_workers: int) -> None:
        self._num_workers = num_workers

    async def reserve(self, say: Say, is_ending: asyncio.Event) -> list[str]:
        """Returns free addresses on loopback."""
        del say, is_ending
        return find_addresses(self._num_workers)

    def start(
        self,
        label: str,
        index: int | None,
        arguments: Sequence[str],
        environment: Mapping[str, str],
    ) -> Process:
        """Starts a process here."""
        del index
        return Child(label, arguments, environment)
