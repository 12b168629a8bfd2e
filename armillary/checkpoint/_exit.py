"""Finishes saves when a program ends right after it started one."""

import threading
import weakref
from typing import Protocol

from armillary._logging import logger
from armillary.errors import CheckpointError


class _Synced(Protocol):
    def sync(self) -> None: ...


_managers: "weakref.WeakSet[_Synced]" = weakref.WeakSet()
_lock = threading.Lock()
_is_registered = False


def sync_at_exit(manager: _Synced) -> None:
    """Makes the interpreter call `manager.sync` before it ends."""
    global _is_registered
    with _lock:
        _managers.add(manager)
        if not _is_registered:
            # `atexit` runs too late: by then no executor takes work any more, and the
            # save that is running would be lost (python/cpython#148280).
            threading._register_atexit(_sync_all)  # pyright: ignore[reportAttributeAccessIssue]
            _is_registered = True


def _sync_all() -> None:
    for manager in list(_managers):
        try:
            manager.sync()
        except CheckpointError as error:
            logger.error("%s", error)
