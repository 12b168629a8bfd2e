"""What runs beside a worker on a machine of a Ray cluster: its parent process.

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
from collections.abc import Mapping, Sequence

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
