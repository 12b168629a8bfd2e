"""Ties a worker's life to the launcher's, then becomes the worker.

The launcher runs this file by its path, in the new process: nothing but the standard
library is imported, and `exec` leaves nothing of it behind. The kernel kills a process
that asked for it (`prctl(2)`, `PR_SET_PDEATHSIG`) when the thread that started it ends,
and the request outlives `exec`. Asking between `fork` and `exec` inside the launcher
would run Python in a copy of a program that has other threads.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def become_worker(launcher: int, command: list[str]) -> None:
    """Replaces this process by `command`, which ends when process `launcher` does."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        reason = os.strerror(ctypes.get_errno())
        sys.exit(f"cannot tie this worker to its launcher: {reason}")
    # The launcher may have ended before the request.
    if os.getppid() != launcher:
        sys.exit("the launcher of this worker is gone")
    os.execv(command[0], command)


if __name__ == "__main__":
    become_worker(int(sys.argv[1]), sys.argv[2:])
