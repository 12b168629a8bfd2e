"""One process of a job: a worker or the evaluator."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from io import FileIO
from pathlib import Path
from typing import cast

from armillary.launch._outcome import Ending

_EXEC = str(Path(__file__).with_name("_exec.py"))


class Child:
    """A running process, leader of a group of its own.

    A group of its own keeps the terminal's Ctrl-C away, which the launcher passes on
    instead, and lets the processes that the child itself started end with it.

    It must be constructed in the thread that lives longest, because the kernel ends the
    child together with that thread, and below a running event loop.

    Args:
        label: Its name, such as `worker 0`.
        arguments: What follows `python` on its command line.
        environment: All of its environment variables.

    Attributes:
        ended: How it ended, once `look` has found that it did.
        stdout, stderr: The unbuffered read ends of its streams.

    Raises:
        OSError: If the system does not start another process.
    """

    def __init__(
        self, label: str, arguments: Sequence[str], environment: Mapping[str, str]
    ) -> None:
        self.label = label
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
        self.ended: asyncio.Future[Ending] = asyncio.get_running_loop().create_future()
        self._start = time.monotonic()

    def look(self) -> None:
        """Sets `ended` if the process has ended; to be called at each SIGCHLD."""
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
        returncode = self._process.wait()
        seconds = time.monotonic() - self._start
        self.ended.set_result(Ending(returncode=returncode, seconds=seconds))

    def send_signal(self, number: int) -> None:
        """Sends a signal to the process alone, if it runs.

        Its own children do not get it: they have to work for as long as it needs to
        save.
        """
        if not self.ended.done():
            os.kill(self._process.pid, number)
