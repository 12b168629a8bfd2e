"""The lock and the file `DONE` in a directory of checkpoints.

A file `DONE` next to the checkpoints shows an evaluation job that no checkpoint will
follow. The file is written when the training program ends, if its last training ended
without an error (a program may train several times). A program that begins to train
again deletes it.
"""

import atexit
import contextlib
import errno
import fcntl
import json
import os
import platform
import threading
import time
from collections.abc import Iterator

from etils import epath

from armillary._logging import logger
from armillary._process import get_process
from armillary.errors import CheckpointError

FILE_NAME = "DONE"
_LOCK = ".lock"
# The text that this program will write into `DONE`, by directory.
_ends: dict[str, str] = {}
# The thread that trains in each directory, as the only item of a list of its own.
_threads: dict[str, list[threading.Thread]] = {}


@contextlib.contextmanager
def training_in(directory: str | None) -> Iterator[None]:
    """Locks a directory, and deletes the file `DONE` of an earlier training."""
    if directory is None or not get_process().is_chief:
        yield
        return
    with _held_by_thread(directory) as is_outermost:
        if not is_outermost:
            # A second file would free the lock of the first when it is closed.
            yield
            return
        with _locked(directory):
            _ends.pop(directory, None)
            (epath.Path(directory) / FILE_NAME).unlink(missing_ok=True)
            try:
                yield
            except BaseException:
                # A training within this one may have ended without an error.
                _ends.pop(directory, None)
                raise


@contextlib.contextmanager
def _held_by_thread(directory: str) -> Iterator[bool]:
    """Refuses a second thread, because a process holds the file lock, not a thread.

    It yields whether this is no call within a call.
    """
    own = [threading.current_thread()]
    found = _threads.setdefault(directory, own)
    if found is own:
        try:
            yield True
        finally:
            del _threads[directory]
    elif found == own:
        yield False
    else:
        raise CheckpointError(
            f"The thread {found[0].name!r} of this process trains in `{directory}`, "
            "and two runs would delete each other's checkpoints. Wait for that run, "
            "or use another directory for this run."
        )


@contextlib.contextmanager
def _locked(directory: str) -> Iterator[None]:
    """Holds the lock of a directory, so that a second program is refused.

    The kernel frees the lock when the process ends, also after `kill -9`.
    """
    if "://" in directory:
        yield
        return
    path = os.path.join(directory, _LOCK)
    host = platform.node()
    try:
        os.makedirs(directory, exist_ok=True)
        file = open(path, "a+")  # noqa: SIM115 (closed below, after the block)
    except OSError as error:
        raise CheckpointError(
            f"`{directory}` cannot be written ({error.strerror}), but training writes "
            "its checkpoints there. Change its rights, or use another directory."
        ) from error
    with file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            file.truncate(0)
            file.write(f"{os.getpid()} on {host}")
            file.flush()
        except OSError as error:
            # Some file systems have no locks.
            if error.errno in (errno.EACCES, errno.EAGAIN):
                file.seek(0)
                number, _, other = file.read().partition(" on ")
                _refuse(directory, number, None if other == host else other)
        yield


def _refuse(directory: str, number: str, host: str | None) -> None:
    text = (
        f"Process {number} on {host or 'this machine'} trains in `{directory}`, and "
        "two runs would delete each other's checkpoints. End that run, or use another "
        "directory for this run."
    )
    if host is None:
        raise CheckpointError(text)
    # A lost machine's lock may remain for a long time, so this is only a warning.
    logger.warning("%s", text)


def end_training(directory: str | None, step: int) -> None:
    """Writes `DONE` when this program ends, unless it trains again before."""
    if directory is not None and get_process().is_chief:
        _ends[directory] = json.dumps({"step": step, "time": time.time()})


@atexit.register
def announce_ends() -> None:
    """Writes the files `DONE`; the interpreter calls this when the program ends."""
    for directory, text in _ends.items():
        folder = epath.Path(directory)
        if folder.is_dir():  # A temporary directory may be gone by now.
            (folder / FILE_NAME).write_text(text)


def read_end(directory: str) -> str | None:
    """Returns the text of `DONE`, or `None`; each training writes a different text."""
    try:
        return (epath.Path(directory) / FILE_NAME).read_text()
    except OSError:
        return None
