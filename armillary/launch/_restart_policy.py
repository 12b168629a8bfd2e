"""When to restart a job, after which pause, and how often."""

from armillary._exit_code import ExitCode

MAX_PAUSE_SECONDS = 60.0
"""The pause doubles up to here, unless it starts above."""


class RestartPolicy:
    """Counts the restarts of one job.

    Every restart counts, whatever its cause, so an error that is there on each start
    ends the job as well.

    Args:
        max_restarts: Number of restarts allowed.
        pause_seconds: Pause before the first restart; each later one is twice as long.
    """

    def __init__(self, max_restarts: int, pause_seconds: float) -> None:
        self.max_restarts = max_restarts
        self.num_restarts = 0
        self._pause_seconds = pause_seconds

    def find_exit_code(self, cause: ExitCode) -> ExitCode | None:
        """Returns the exit code of the job, or `None` if it is to be restarted.

        Args:
            cause: Why the attempt ended.
        """
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
