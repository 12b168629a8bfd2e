"""Finishes saves when a program ends right after it started one."""

import threading
import weakref
from typing import TYPE_CHECKING

from armillary._logging import logger
from armillary.errors import CheckpointError
from armillary.lifeline._ending import finish_first

if TYPE_CHECKING:
    from armillary.checkpoint._writer import Writer

_writers: "weakref.WeakSet[Writer]" = weakref.WeakSet()
_lock = threading.Lock()
_is_registered = False


def sync_at_exit(writer: "Writer") -> None:
    """Makes the interpreter call `writer.sync` before it ends.

    Call it after the save has started.
    """
    global _is_registered
    with _lock:
        _writers.add(writer)
        if not _is_registered:
            # `atexit` runs too late: by then no executor takes work any more, and the
            # save that is running would be lost (python/cpython#148280). Executors are
            # closed by a hook of this same kind. Hooks run last in, first out, and
            # theirs is older: a save that has started has imported them. In Python
            # 3.12.0 to 3.12.2 no hook can wait for a save, because no thread starts
            # once the main one has ended (python/cpython#113964), so `pyproject.toml`
            # excludes them.
            threading._register_atexit(_sync_all)  # pyright: ignore[reportAttributeAccessIssue]
            # The save also completes if the process ends because another one is gone.
            finish_first(_is_writing)
            _is_registered = True


def find_running() -> list[threading.Thread]:
    """Returns the threads of the saves that are not complete yet, of any directory."""
    threads = [writer.thread for writer in list(_writers)]
    return [thread for thread in threads if thread is not None and thread.is_alive()]


def _is_writing() -> bool:
    return bool(find_running())


def _sync_all() -> None:
    for writer in list(_writers):
        try:
            writer.sync()
        except CheckpointError as error:
            logger.error("%s", error)
