"""Options for jobs whose machines may be taken away."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from armillary._checks import answers_old_names, check_callable, check_not_negative


@answers_old_names(
    termination_watcher_fn="It is called `watcher` here.",
    save_fn="Leave it out: the checkpoint manager saves.",
)
@dataclass(frozen=True, kw_only=True)
class TerminationConfig:
    """How a job learns that a machine is going to be taken, and how it ends.

    It is that of `tf.distribute.experimental`. SIGTERM is a notice in any case.

    Args:
        grace_period: Seconds from the notice to the end of the machine. With `None` or
            0 the job saves after the loop that is running, and ends. With more, it
            saves, trains on while there is certainly time for another save, saves
            again, and ends: worth it if the period is many times as long as a save.
        exit_fn: Called without arguments in all processes once they have saved. If it
            returns, training goes on. `None` ends the program with exit code 77,
            `armillary.cluster.ExitCode.PREEMPTED`.
        watcher: A function without arguments that returns whether the machine is going
            to be taken, for platforms that do not say it by SIGTERM. A thread calls it
            about once a second. Where it fails, that is logged once, and it is called
            again.

    Raises:
        TypeError: If `exit_fn` or `watcher` is not callable.
        ValueError: If `grace_period` is negative.
    """

    grace_period: float | None = None
    exit_fn: Callable[[], Any] | None = None
    watcher: Callable[[], bool] | None = None

    def __post_init__(self) -> None:
        if self.grace_period is not None:
            check_not_negative("grace_period", self.grace_period)
        if self.exit_fn is not None:
            check_callable("exit_fn", self.exit_fn)
        if self.watcher is not None:
            check_callable("watcher", self.watcher)
