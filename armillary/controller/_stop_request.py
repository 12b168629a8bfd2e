"""Requests to stop, on which all processes agree."""

from armillary._checks import (
    check_instance,
)
from armillary.cluster._join import expire_boundary, get_peers


class StopRequest:
    """A request to end a controller's call; all processes agree on the step."""

    def __init__(self) -> None:
        self.reason: str | None = None
        self._is_agreed = False
        self._asked_at = -1

    def clear(self) -> None:
        """Clears the request when a new call begins."""
        self.reason = None
        self._is_agreed = False
        expire_boundary()

    def make(self, reason: str) -> None:
        """Requests a stop; the first of several requests counts."""
        fix = 'Use `request_stop("the loss diverged")`.'
        check_instance("reason", reason, str, fix)
        # No lock and no logging, because a signal handler may interrupt either.
        if self.reason is None:
            self.reason = reason

    def is_agreed(self) -> bool:
        """Returns whether any process requested a stop; all processes call this."""
        peers = get_peers()
        if peers.is_alone:
            return self.reason is not None
        # Between two loops, the first answer counts.
        boundary = peers.boundary
        if not self._is_agreed and self._asked_at != boundary.num_expired:
            self._asked_at = boundary.num_expired
            answers = boundary.take(self._own_value)
            answers = answers or boundary.exchange("whether to stop", self._own_value)
            for index, reasons in enumerate(answers):
                if reasons and not self._is_agreed:
                    who = f"requested in process {index} of {peers.count}"
                    self.reason = f"{reasons[0]} ({who})"
                    self._is_agreed = True
        return self._is_agreed

    def _own_value(self) -> list[str]:
        return [] if self.reason is None else [self.reason]
