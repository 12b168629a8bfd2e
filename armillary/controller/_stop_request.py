"""Whether a run is to stop: asked for in one process, agreed between all of them."""

from collections.abc import Callable

from armillary._logging import logger
from armillary.cluster._join import expire_boundary, get_peers


class StopRequest:
    """The request to end the call of a controller that is in progress.

    Attributes:
        reason: Why to stop, or `None` while this process knows of no request.
    """

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
            for index, reason in reversed(list(enumerate(said))):
                if reason:
                    at = f"(requested in process {index} of {peers.count})"
                    self.reason = f"{reason[0]} {at}"
                    self._is_agreed = True
        return self._is_agreed

    def _say(self) -> list[str]:
        """Returns the reason, if there is one, for the other processes."""
        return [] if self.reason is None else [self.reason]

    def log(self, read_step: Callable[[], int]) -> None:
        """Logs the reason, if there is one, and the global step that was reached."""
        if self.reason is not None:
            logger.info("stopped at step %d: %s", read_step(), self.reason)
