"""One process of a job: its start, its messages and its end."""

import asyncio
import contextlib
import json
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
from typing import Any, cast

from armillary._launcher import VARIABLE
from armillary._process import ExitCode

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
