"""The number of this process in its job, and exit codes.

Asking JAX would start its devices, so the code that joins processes records the number
here. A program that joins no other processes is process 0 of 1. Only process 0, the
chief, writes log lines and files.
"""

from dataclasses import dataclass
from enum import IntEnum


class ExitCode(IntEnum):
    """Exit codes of a worker, and of the launcher that runs it.

    A script may exit with one of them (`raise SystemExit(ExitCode.RESTART_REQUESTED)`),
    and a scheduler may react to them. 75 is a temporary failure in `sysexits.h`. Shells
    use 130 and 143 for the two signals.
    """

    OK = 0
    """Every process exited with 0."""
    FAILED = 1
    """A process failed, and was not restarted."""
    USAGE = 2
    """The command line of the launcher, or of the script, is wrong."""
    RESTART_REQUESTED = 75
    """Run the same command again: another process died or hangs."""
    TOO_MANY_RESTARTS = 76
    """A process failed again after the last restart that was allowed."""
    PREEMPTED = 77
    """Stopped by a signal after saving: the same command continues from there."""
    INTERRUPTED = 130
    """Stopped by SIGINT (Ctrl-C), and not every worker has reported a save."""
    TERMINATED = 143
    """Stopped by SIGTERM or SIGHUP, and not every worker has reported a save."""


READER_THREADS = "armillary-prefetch"
"""The name of the threads that read data ahead."""


@dataclass(frozen=True)
class Process:
    """A process of a job: its number, from 0, and the number of processes."""

    index: int
    count: int

    @property
    def is_chief(self) -> bool:
        """True for the process that writes log lines, summaries and files."""
        return self.index == 0

    def __str__(self) -> str:
        return f"process {self.index} of {self.count}"


_current = Process(0, 1)


def get_process() -> Process:
    """Returns this process."""
    return _current


def set_process(process: Process) -> None:
    """Records the number of this process, once it has joined the other processes."""
    global _current
    _current = process


def is_first() -> bool:
    """Returns whether this is the first process that JAX has joined."""
    # The program may have joined processes itself. Only then, this starts the devices.
    import jax

    return not jax.distributed.is_initialized() or jax.process_index() == 0
