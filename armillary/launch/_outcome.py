"""What the end of a process means for the job: its exit code, or a restart."""

import signal
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from armillary._process import ExitCode

MAX_PAUSE_SECONDS = 60.0
_SPOKEN_FOR = (ExitCode.USAGE, ExitCode.RESTART_REQUESTED, ExitCode.PREEMPTED)


@dataclass(frozen=True, kw_only=True)
class Ending:
    """How one process ended.

    Args:
        returncode: Its exit code, or the negated number of the signal that killed it.
        seconds: How long it ran.
        loss: Where and why it was lost, if nobody saw how it ended.
    """

    returncode: int
    seconds: float
    loss: str = ""

    @property
    def cause(self) -> ExitCode:
        """What the end means for the job; `FAILED` if nothing more is known."""
        if self.returncode == 0:
            return ExitCode.OK
        if self.returncode in _SPOKEN_FOR:
            return ExitCode(self.returncode)
        return ExitCode.FAILED

    @property
    def is_reaction(self) -> bool:
        """Whether the process ended because of something that happened elsewhere."""
        return self.cause in {ExitCode.RESTART_REQUESTED, ExitCode.PREEMPTED}

    def describe(self) -> str:
        """Returns how and when the process ended, such as `exit code 1 after 2.5 s`."""
        if self.loss:
            return f"lost after {self.seconds:.1f} s, {self.loss.rstrip('.')}"
        if self.returncode < 0:
            way = f"killed by {name_signal(-self.returncode)}"
        else:
            way = f"exit code {self.returncode}"
        if self.is_reaction:
            way += f" ({self.cause.name})"
        return f"{way} after {self.seconds:.1f} s"


def describe_failure(who: str, ending: Ending, tail: Iterable[str]) -> str:
    """Returns what is said of a process that failed, with the end of its stderr."""
    text = f"{who}: {ending.describe()}."
    lines = [f"  | {line}" for line in tail if line.strip()]
    if lines:
        text += "\n".join([" Its stderr ended with:", *lines])
    return text


def name_signal(number: int) -> str:
    """Returns the name of a signal, such as `SIGKILL`; real-time ones have none."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def find_stop_code(number: int, causes: Sequence[ExitCode]) -> ExitCode:
    """Returns the exit code of a job that a signal stopped.

    It depends on how each process ended; between two attempts there is none.
    """
    if causes and all(cause is ExitCode.OK for cause in causes):
        return ExitCode.OK
    if causes and all(cause in {ExitCode.OK, ExitCode.PREEMPTED} for cause in causes):
        return ExitCode.PREEMPTED
    if number == signal.SIGINT:
        return ExitCode.INTERRUPTED
    return ExitCode.TERMINATED


class RestartPolicy:
    """Counts restarts, and says when there is another one and after which pause.

    Every restart counts, whatever its cause, so an error that is there on each start
    ends the job as well. Each pause is twice as long as the one before, up to a minute,
    unless the first one is longer than that.
    """

    def __init__(self, max_restarts: int, pause_seconds: float) -> None:
        self.max_restarts = max_restarts
        self.num_restarts = 0
        self._pause_seconds = pause_seconds

    def find_exit_code(self, cause: ExitCode) -> ExitCode | None:
        """Returns the exit code for a cause, or `None` if it leads to a restart."""
        # The same command line will be as wrong the next time.
        if cause in {ExitCode.OK, ExitCode.USAGE}:
            return cause
        if self.num_restarts < self.max_restarts:
            return None
        return ExitCode.TOO_MANY_RESTARTS if self.max_restarts else cause

    def begin_restart(self) -> float:
        """Counts one restart and returns the seconds to wait before it."""
        # The bound of the exponent keeps the power a number that a float can hold.
        pause = self._pause_seconds * 2 ** min(self.num_restarts, 30)
        self.num_restarts += 1
        return min(pause, max(MAX_PAUSE_SECONDS, self._pause_seconds))
