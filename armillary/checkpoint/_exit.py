"""Finishes saves when a program ends right after it started one."""

import threading
import weakref
from typing import Protocol

from armillary._logging import logger
from armillary.errors import CheckpointError
from armillary.lifeline._ending import finish_first


class _Synced(Protocol):
    @property
    def is_writing(self) -> bool: ...
    def sync(self) -> None: ...


_managers: "weakref.WeakSet[_Synced]" = weakref.WeakSet()
_lock = threading.Lock()
_is_registered = False


def sync_at_exit(manager: _Synced) -> None:
    """Makes the interpreter call `manager.sync` before it ends.

    Call it after the save has started.
    """
    global _is_registered
    with _lock:
        _managers.add(manager)
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


def _is_writing() -> bool:
    return any(manager.is_writing for manager in list(_managers))


def _sync_all() -> None:
    for manager in list(_managers):
        try:
            manager.sync()
        except CheckpointError as error:
            logger.error("%s", error)
