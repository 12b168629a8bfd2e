"""A worker process as the parent sees it: started, asked, and ended in any case."""

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from benchmarks.protocol import write_message

REPOSITORY = Path(__file__).resolve().parents[1]
_QUIT_SECONDS = 10.0
_SETTLE_SECONDS = 2.0
_SETTLE_WINDOW = 0.05
_TAIL_LINES = 8


class WorkerError(Exception):
    """A worker failed, ended or did not answer in time.

    Args:
        message: The text of the error.
        skip: Whether the contestant just does not support the case.
    """

    def __init__(self, message: str, *, skip: bool = False) -> None:
        super().__init__(message)
        self.skip = skip


def run_job(
    module: str,
    words: Sequence[str],
    *,
    processes: int,
    devices: int,
    timeout_seconds: float,
) -> None:
    """Runs a module in all processes of a job, with some CPU devices each.

    Raises:
        subprocess.CalledProcessError: If the job failed.
    """
    subprocess.run(
        [
            *(sys.executable, "-m", "armillary", "launch"),
            *("--workers", str(processes), "--devices-per-worker", str(devices)),
            *("-m", module, *words),
        ],
        check=True,
        cwd=REPOSITORY,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        stdout=subprocess.DEVNULL,
        timeout=timeout_seconds,
    )


def ask_module(module: str, *arguments: str, timeout_seconds: float) -> Any:
    """Returns the JSON that a module prints last, run in a process of its own.

    Args:
        module: Its name.
        arguments: Its arguments.
        timeout_seconds: How long to wait.
    """
    answer = subprocess.run(
        [sys.executable, "-m", module, *arguments],
        check=True,
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        text=True,
        timeout=timeout_seconds,
    ).stdout
    return json.loads(answer.splitlines()[-1])


class WorkerProcess:
    """One process that speaks the protocol.

    It is a context manager: at its end the process and its children are gone.

    Args:
        name: The contestant, for messages.
        command: The command line.
        environment: Variables to set on top of this process's own.
    """

    def __init__(
        self, name: str, command: Sequence[str], environment: Mapping[str, str] = {}
    ) -> None:
        self.name = name
        self._errors: IO[str] = tempfile.TemporaryFile("w+")  # noqa: SIM115
        # A session of its own: Ctrl-C reaches the parent alone, which then ends the
        # worker with all its children.
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            cwd=REPOSITORY,
            env={**os.environ, **environment},
            start_new_session=True,
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._requests: IO[str] = self._process.stdin
        self._lines: queue.Queue[str] = queue.Queue()
        replies = self._process.stdout
        self._reader = threading.Thread(target=self._read, args=(replies,), daemon=True)
        self._reader.start()

    def __enter__(self) -> "WorkerProcess":
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        # After Ctrl-C nobody wants to wait for a burst to end.
        if kind is None:
            self.close()
        else:
            self.kill()

    @property
    def pid(self) -> int:
        """The process's number."""
        return self._process.pid

    def wait_ready(self, seconds: float) -> dict[str, Any]:
        """Returns the message `ready`.

        Raises:
            WorkerError: If there is another answer, or none in time.
        """
        return self._receive("ready", seconds)

    def run(self, steps: int, seconds: float) -> dict[str, Any]:
        """Runs steps and returns the message `ran`.

        Raises:
            WorkerError: If there is another answer, or none in time.
        """
        with contextlib.suppress(BrokenPipeError):  # The answer will be missing.
            write_message(self._requests, {"run": steps})
        return self._receive("ran", seconds)

    def cpu_seconds(self) -> float | None:
        """Returns processor time used so far, `None` where the system hides it."""
        try:
            fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2]
        except OSError:
            return None
        user, system = fields.split()[11:13]
        return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")

    def settle(self) -> None:
        """Waits until the process rests: until it has read its next inputs ahead."""
        end = time.monotonic() + _SETTLE_SECONDS
        before = self.cpu_seconds()
        while before is not None and time.monotonic() < end:
            time.sleep(_SETTLE_WINDOW)
            after = self.cpu_seconds()
            if after is None or after == before:
                return
            before = after

    def close(self) -> None:
        """Asks the process to quit, and ends it with its children if it does not."""
        if self._errors.closed:
            return
        with contextlib.suppress(OSError):
            write_message(self._requests, {"quit": True})
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_QUIT_SECONDS)
        self.kill()

    def kill(self) -> None:
        """Ends the process and its children at once."""
        if self._errors.closed:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        # With the last writer gone, the thread comes to the end of its file.
        self._reader.join()
        with contextlib.suppress(OSError):  # A request was not sent.
            self._requests.close()
        self._errors.close()

    def _read(self, replies: IO[str]) -> None:
        with replies:
            for line in replies:
                self._lines.put(line)
        self._lines.put("")

    def _receive(self, event: str, seconds: float) -> dict[str, Any]:
        try:
            line = self._lines.get(timeout=seconds)
        except queue.Empty:
            raise WorkerError(
                f"{self.name} did not answer within {seconds:.0f} s.{self._tail()}"
            ) from None
        if not line:
            self._lines.put("")
            raise WorkerError(f"{self.name} ended without an answer.{self._tail()}")
        try:
            message = json.loads(line)
        except ValueError as error:
            raise WorkerError(
                f"{self.name} wrote {line!r}, which is no message."
            ) from error
        if message.get("event") == "error":
            raise WorkerError(message["message"], skip=message.get("skip", False))
        if message.get("event") != event:
            raise WorkerError(f"{self.name} answered {message}, not {event!r}.")
        return message

    def _tail(self) -> str:
        self._errors.seek(0)
        lines = self._errors.read().splitlines()[-_TAIL_LINES:]
        return "".join(f"\n  {line}" for line in lines)
