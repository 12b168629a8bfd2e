"""What the parts of a controller share, and whether its call is to stop."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

from armillary._logging import logger
from armillary.cluster._join import expire_boundary, get_peers
from armillary.controller._outputs import Curves, History
from armillary.goodput._journal import Recorder
from armillary.state._summarize import StepCounter
from armillary.typing import Action


class StopRequest:
    """The request to end a controller's call: made in one process, agreed by all."""

    def __init__(self) -> None:
        self.reason: str | None = None
        self._is_agreed = False
        self._asked_at = -1

    def clear(self) -> None:
        """Forgets the request: a new call begins."""
        self.reason = None
        self._is_agreed = False
        expire_boundary()

    def make(self, reason: str) -> None:
        """Requests a stop; of several requests the first counts."""
        if not isinstance(reason, str):
            raise TypeError(
                f"`reason` is {reason!r} of type {type(reason).__name__}, but it must "
                'be a string for the log. Use `request_stop("the loss diverged")`.'
            )
        # No lock and no logging: a signal handler may interrupt either.
        if self.reason is None:
            self.reason = reason

    def is_agreed(self) -> bool:
        """Returns whether any process requested a stop; all of them must ask.

        Between two loops, the answer stays what it was when it was asked for first.
        """
        peers = get_peers()
        if peers is None:
            return self.reason is not None
        boundary = peers.boundary
        if not self._is_agreed and self._asked_at != boundary.num_expired:
            self._asked_at = boundary.num_expired
            said = boundary.take(self._say) or boundary.exchange(
                "whether to stop", self._say
            )
            requests = [(index, own[0]) for index, own in enumerate(said) if own]
            if requests:
                index, reason = requests[0]
                self.reason = (
                    f"{reason} (requested in process {index} of {peers.count})"
                )
                self._is_agreed = True
        return self._is_agreed

    def _say(self) -> list[str]:
        return [] if self.reason is None else [self.reason]


@dataclasses.dataclass
class Run:
    """What the parts of one controller share; settings are those of `Controller`.

    Attributes:
        directory: That of the checkpoints.
        read_step: Returns the global step; waits for the device if it must.
        scope: Enters the strategy's scope.
        goodput: Counts what the time goes into.
        curves: Take the outputs of loops, and `eval_curves` those of evaluations.
        stop: The request to end the call in progress.
        history: What the call in progress has seen.
    """

    trainer: Any
    strategy: Any
    steps_per_loop: int | Callable[[int], int] | None
    summary_interval: int | None
    log_interval: int | None
    train_actions: tuple[Action, ...]
    directory: str | None
    read_step: StepCounter
    scope: Callable[[], contextlib.AbstractContextManager[Any]]
    goodput: Recorder
    curves: Curves
    eval_curves: Curves
    stop: StopRequest = dataclasses.field(default_factory=StopRequest)
    history: History = dataclasses.field(default_factory=History)

    def take_history(self) -> History:
        """Returns the history of a call; what follows is none of it."""
        history, self.history = self.history, History()
        return history

    def log_stop(self) -> None:
        """Logs why the call was stopped, if it was."""
        if self.stop.reason is not None:
            logger.info("stopped at step %d: %s", self.read_step(), self.stop.reason)


@contextlib.contextmanager
def finishing(
    report: Callable[[], None], *finishes: Callable[[], None]
) -> Iterator[None]:
    """Calls `finishes` after a block; after an error, which is raised, `report` too."""
    try:
        yield
    except BaseException as error:
        peers = get_peers()
        cause = None if peers is None else peers.explain(error)
        for finish in (report, *finishes):
            try:
                finish()
            except Exception as later_error:
                # What failed may say so again.
                if str(later_error) != str(error):
                    error.add_note(f"Pending writes failed as well: {later_error!r}")
                    logger.warning("Pending writes failed as well: %r", later_error)
        if cause is not None:
            raise cause from error
        raise
    for finish in finishes:
        finish()
