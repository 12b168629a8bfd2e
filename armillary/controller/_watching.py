"""Waits for checkpoints that another job writes, until it says that none will follow.

It says so with a file beside them, `DONE`: it appears when the program that trains
ends, if its last training ended well (a program may train several times), and is taken
away when a program begins to train again.
"""

import atexit
import json
import time
from collections.abc import Callable, Iterator, Sequence

from etils import epath

from armillary._logging import logger
from armillary._process import get_process
from armillary.errors import CheckpointDamageError

FILE_NAME = "DONE"
_POLL_SECONDS = 1.0
_OLD_END_SECONDS = 300.0
"""After this time, the end of an earlier training counts: no other one has begun."""

# What the end of this program says, by directory.
_ends: dict[str, str] = {}


def begin_training(directory: str | None) -> None:
    """Takes the file of an earlier training away, in the chief of all processes."""
    if directory is None or not get_process().is_chief:
        return
    _ends.pop(directory, None)
    path = epath.Path(directory) / FILE_NAME
    try:
        if path.is_file():
            path.unlink()
    except OSError as error:
        logger.warning(
            "`%s` cannot be removed (%s): an evaluator may end too early.", path, error
        )


def end_training(directory: str | None, step: int) -> None:
    """Lets the end of this program say that training is over, unless that goes on."""
    if directory is not None and get_process().is_chief:
        _ends[directory] = json.dumps({"step": step, "time": time.time()})


@atexit.register
def announce_ends() -> None:
    """Writes the files; the interpreter calls it when the program ends."""
    for directory, text in _ends.items():
        path = epath.Path(directory) / FILE_NAME
        try:
            # A temporary directory may be gone by now.
            if path.parent.is_dir():
                path.write_text(text)
        except OSError as error:
            logger.warning(
                "`%s` cannot be written (%s): an evaluator may wait on.", path, error
            )


def read_end(directory: str | None) -> str | None:
    """Returns what the file says, another text for each training, or `None`."""
    try:
        return (epath.Path(directory) / FILE_NAME).read_text() if directory else None
    except OSError:
        return None


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

    The timeout is that of `Controller.evaluate_continuously`.
    """
    seen: set[str] = set()
    seconds = float("inf") if timeout is None else timeout
    last_at = time.monotonic()
    old_end, old_end_counts = read_end(), last_at + _OLD_END_SECONDS
    while not should_stop():
        # ORDER: the clock is read before the directory, so that a checkpoint written
        # in the last moment of the wait is still found; so is the end of training.
        now, end = time.monotonic(), read_end()
        new = [path for path in list_checkpoints() if path not in seen]
        remaining = last_at + seconds - now
        if new:
            seen.add(new[0])
            yield new[0]
        elif end is not None and (end != old_end or now >= old_end_counts):
            return
        elif remaining > 0:
            time.sleep(min(_POLL_SECONDS, remaining))
            continue
        elif timeout_fn is None or timeout_fn():
            return
        last_at = time.monotonic()


def restore_if_good(restore: Callable[[str], object], path: str) -> bool:
    """Restores a checkpoint; returns False if it is damaged or deleted meanwhile."""
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
