"""Waits for checkpoints that another job writes, and passes over what is not usable."""

import time
from collections.abc import Callable, Iterator, Sequence

from armillary._logging import logger
from armillary.errors import CheckpointDamageError

_POLL_SECONDS = 1.0
_OLD_END_SECONDS = 300.0
"""After this time, the end of an earlier training counts: no other one has begun."""


def watch_checkpoints(
    list_checkpoints: Callable[[], Sequence[str]],
    read_end: Callable[[], str | None],
    *,
    timeout: float | None,
    timeout_fn: Callable[[], bool] | None,
    should_stop: Callable[[], bool],
) -> Iterator[str]:
    """Yields every checkpoint once, oldest first, as they appear.

    When training has ended, it ends with the last of them. An end that is there from
    the start may be that of an earlier training, while a longer one is about to begin
    and to take it away. So it counts only after five minutes.

    `read_end` returns a text once training has ended, another one for each training.
    The timeout is that of `Controller.evaluate_continuously`.
    """
    seen: set[str] = set()
    old_end, old_end_counts = read_end(), time.monotonic() + _OLD_END_SECONDS
    deadline = _deadline(timeout)
    while not should_stop():
        # ORDER: the clock is read before the directory, so that a checkpoint written
        # in the last moment of the wait is still found; so is the end of training.
        now = time.monotonic()
        remaining, is_old_end_due = deadline - now, now >= old_end_counts
        end = read_end()
        new = [path for path in list_checkpoints() if path not in seen]
        if new:
            seen.add(new[0])
            yield new[0]
            deadline = _deadline(timeout)
        elif end is not None and (end != old_end or is_old_end_due):
            return
        elif remaining > 0:
            time.sleep(min(_POLL_SECONDS, remaining))
        elif timeout_fn is None or timeout_fn():
            return
        else:
            deadline = _deadline(timeout)


def restore_if_good(restore: Callable[[str], object], path: str) -> bool:
    """Restores a checkpoint, unless it is damaged or the other job deletes it now.

    Returns whether it was restored; if not, a warning says why.
    """
    from etils import epath

    try:
        restore(path)
    except Exception as error:
        if not epath.Path(path).exists():
            reason = "it was deleted meanwhile"
        elif isinstance(error, CheckpointDamageError):
            reason = f"it is damaged: {error.damage}"
        else:
            raise
        logger.warning("`%s` is not evaluated: %s.", path, reason)
        return False
    return True


def _deadline(timeout: float | None) -> float:
    return float("inf") if timeout is None else time.monotonic() + timeout
