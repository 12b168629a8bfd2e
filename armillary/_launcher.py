"""Reports from a process to its launcher, if it has one, through a pipe.

A message is a word with its values:

    joining, joined         the process waits for the others, or has met them
    restored, saved         the path of a checkpoint; a save has its number first
    evaluating              the path of another job's checkpoint that is evaluated next
    trained                 the first loop after a restore has ended
    failed                  the error with which the process ends
    caused_by, stopped      the index of a process that ends the job, or does not answer
"""

import contextlib
import json
import os

VARIABLE = "ARMILLARY_LAUNCHER"
"""Holds the process, the descriptor and the inode of its end of the pipe."""
SKIPPED = "ARMILLARY_SKIPPED_CHECKPOINT"
"""Holds the path of a checkpoint to skip."""


_sent: set[tuple[str | int, ...]] = set()


def notify_launcher(word: str, *values: str | int) -> None:
    """Sends a message to the launcher, if there is a launcher.

    Equal messages are sent once, because a process says `trained` after every loop. A
    restore is sent each time, and `trained` again after it.
    """
    if word == "restored":
        _sent.discard(("trained",))
    elif (word, *values) in _sent:
        return
    _sent.add((word, *values))

    pid, *numbers = os.environ.get(VARIABLE, "").split() or [""]
    # A child process of a worker has the same variables, but different files.
    if pid != str(os.getpid()):
        return
    descriptor, inode = map(int, numbers)
    line = f"{json.dumps([word, *values])}\n"
    with contextlib.suppress(OSError):  # The launcher is gone, or no longer reads.
        if os.fstat(descriptor).st_ino == inode:
            os.write(descriptor, line.encode())
