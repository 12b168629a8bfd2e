"""The meaning of the exit codes of workers and of `armillary launch`."""

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
    """A process failed, and restarts were not asked for."""
    USAGE = 2
    """The command line is wrong, of the launcher or of the script."""
    RESTART_REQUESTED = 75
    """Run the same command again: a peer died or is stuck."""
    TOO_MANY_RESTARTS = 76
    """A process failed once more after the last restart that was allowed."""
    PREEMPTED = 77
    """Stopped by a signal after saving: the same command goes on from there."""
    INTERRUPTED = 130
    """Stopped by SIGINT (Ctrl-C), and not every worker says that it saved."""
    TERMINATED = 143
    """Stopped by SIGTERM or SIGHUP, and not every worker says that it saved."""
