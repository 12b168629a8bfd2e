"""Reports from a process to its launcher, if it has one, through a pipe."""

import contextlib
import functools
import json
import os

VARIABLE = "ARMILLARY_LAUNCHER"
"""Holds the process, the descriptor and the inode of its end of the pipe."""
SKIPPED = "ARMILLARY_SKIPPED_CHECKPOINT"
"""Holds the path of a checkpoint to step over."""


@functools.cache
def tell(word: str, *values: str | int) -> None:
    """Tells the launcher something, once, if there is a launcher."""
    pid, *numbers = os.environ.get(VARIABLE, "").split() or [""]
    # What a worker itself starts has its variables, and other files.
    if pid != str(os.getpid()):
        return
    descriptor, inode = map(int, numbers)
    with contextlib.suppress(OSError):  # The launcher is gone, or does not listen.
        if os.fstat(descriptor).st_ino == inode:
            os.write(descriptor, f"{json.dumps([word, *values])}\n".encode())
