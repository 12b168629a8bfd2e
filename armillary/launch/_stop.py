"""A request to stop the job: how long its processes have, and what it comes to."""

import signal
import time
from collections.abc import Collection, Sequence

from armillary._exit_code import ExitCode
from armillary.launch._signals import STOP_SIGNALS

TERMINATE_SECONDS = 5.0
_REPEAT_SECONDS = 1.0


class Stop:
    """Asks processes to end by themselves within `seconds`.

    Attributes:
        number: The signal that asked first.
        due: When to send SIGKILL, by `time.monotonic`.
    """

    def __init__(self, number: int, seconds: float) -> None:
        self.number = number
        self._start = time.monotonic()
        self.due = self._start + seconds

    def ask_again(self, numbers: Collection[int]) -> bool:
        """Takes later signals; returns whether one of them ends the time now."""
        now = time.monotonic()
        # One request may arrive twice: `timeout` signals a process and its group.
        if now <= self._start + _REPEAT_SECONDS or STOP_SIGNALS.isdisjoint(numbers):
            return False
        self.due = now
        return True


def find_stop_code(number: int, causes: Sequence[ExitCode]) -> ExitCode:
    """Returns the exit code of a job that a signal stopped.

    Args:
        number: The signal.
        causes: How each worker ended; empty between two attempts.
    """
    if causes and all(cause is ExitCode.OK for cause in causes):
        return ExitCode.OK
    if causes and all(cause in {ExitCode.OK, ExitCode.PREEMPTED} for cause in causes):
        return ExitCode.PREEMPTED
    if number == signal.SIGINT:
        return ExitCode.INTERRUPTED
    return ExitCode.TERMINATED
