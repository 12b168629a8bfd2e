"""Errors for data that reads the state of a trainer before the state is current."""

import contextlib
import threading
from collections.abc import Callable, Iterator

from armillary.errors import StaleStateError

_FIX = (
    "If the batches depend on the state, let each be read right before its step: "
    "`StandardTrainerOptions(read_ahead=False)`."
)
_DELETED = "has been deleted"
"""Part of JAX's messages on an array that was donated to a program."""


class _Reading(threading.local):
    is_ahead = False


_reading = _Reading()


@contextlib.contextmanager
def reading_ahead() -> Iterator[None]:
    """Marks a block in which this thread reads batches ahead of training steps."""
    before = _reading.is_ahead
    _reading.is_ahead = True
    try:
        yield
    finally:
        _reading.is_ahead = before


def check_state_is_current(name: str) -> None:
    """Raises if the state of a trainer is read for a batch of a later step."""
    if _reading.is_ahead:
        raise StaleStateError(
            f"The training data reads `{name}`, but batches are read ahead, so this "
            f"batch would be made with the state of an earlier step. {_FIX}"
        )


@contextlib.contextmanager
def explaining_deleted_arrays(get_name: Callable[[], str]) -> Iterator[None]:
    """Explains the error of JAX for an array that was donated to a step."""
    try:
        yield
    except (RuntimeError, ValueError) as error:
        if isinstance(error, StaleStateError) or _DELETED not in str(error):
            raise
        raise StaleStateError(
            f"{get_name()} was made from an array whose memory a later step has reused "
            f"({error}). {_FIX} Take the arrays from the trainer again for every "
            "batch, or keep copies of them (`array.copy()`)."
        ) from error
