"""Which process of the job this is: only one of them writes logs and files.

Asking JAX would start its devices. So the code that joins processes records it here.
A program that joins no others is process 0 of 1.
"""

from dataclasses import dataclass
from enum import IntEnum


class ExitCode(IntEnum):
    """Exit codes, the same ones for a worker and for the launcher that runs it.

    A script may end with one of them (`raise SystemExit(ExitCode.RESTART_REQUESTED)`),
    and a scheduler may act on them. 75 is what `sysexits.h` calls a temporary failure,
    and 130 and 143 are what shells make of the two signals.
    """

    OK = 0
    """Every process ended with 0."""
    FAILED = 1
    """A process failed, and was not restarted."""
    USAGE = 2
    """The command line is wrong, of the launcher or of the script."""
    RESTART_REQUESTED = 75
    """Run the same command again: a peer died or is stuck."""
    TOO_MANY_RESTARTS = 76
    """A process failed once more after the last restart that was allowed."""
    PREEMPTED = 77
    """Stopped by a signal after saving: the same command continues from there."""
    INTERRUPTED = 130
    """Stopped by SIGINT (Ctrl-C), and not every worker says that it saved."""
    TERMINATED = 143
    """Stopped by SIGTERM or SIGHUP, and not every worker says that it saved."""


READER_THREADS = "armillary-prefetch"
"""The name of the threads that read data ahead."""


@dataclass(frozen=True)
class Process:
    """A process of a job: its number, from 0, and how many train together."""

    index: int
    count: int

    @property
    def is_chief(self) -> bool:
        """Whether this is the one that writes log lines, summaries and files."""
        return self.index == 0

    def __str__(self) -> str:
        return f"process {self.index} of {self.count}"


_current = Process(0, 1)


def get_process() -> Process:
    """Returns which process this is."""
    return _current


def set_process(process: Process) -> None:
    """Records which process this is, once it has joined the others."""
    global _current
    _current = process


def is_first() -> bool:
    """Returns whether this is the first process of those that JAX has joined."""
    # The program may have joined them itself. Only then are devices started here.
    import jax

    return not jax.distributed.is_initialized() or jax.process_index() == 0
