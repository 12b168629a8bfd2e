"""Receives the notice that the machine of this process will be taken away.

A signal handler runs between any two instructions of the main thread, which may hold
any lock. So the handler only sets an attribute, and training reads it between loops.
"""

import atexit
import os
import signal
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType
from typing import Any

from armillary._checks import check_callable
from armillary._logging import logger


@dataclass(frozen=True, kw_only=True)
class TerminationConfig:
    """Says how a job notices that a machine will be taken away, and how it ends then.

    The name is from `tf.distribute.experimental`. SIGTERM is always a notice.

    Args:
        exit_fn: Called without arguments in all processes once they have saved. If it
            returns, training continues. `None` ends the program with exit code 77,
            `armillary.cluster.ExitCode.PREEMPTED`.
        watcher: A function without arguments that returns whether the machine will be
            taken away, for platforms that do not send SIGTERM. A thread calls it about
            once a second. The first failure is logged, and the calls continue.

    Raises:
        TypeError: If `exit_fn` or `watcher` is not callable.
    """

    exit_fn: Callable[[], Any] | None = None
    watcher: Callable[[], bool] | None = None

    def __post_init__(self) -> None:
        if self.exit_fn is not None:
            check_callable("exit_fn", self.exit_fn)
        if self.watcher is not None:
            check_callable("watcher", self.watcher)


_POLL_SECONDS = 1.0
kept: "set[PreemptionNotice]" = set()
"""The notices for which the program is ending; they listen until it has ended."""


class PreemptionNotice:
    """Handles SIGTERM and polls a watcher, until it is closed or garbage-collected."""

    def __init__(self, watcher: Callable[[], bool] | None = None) -> None:
        self.source: str | None = None
        self.is_closed = False
        reference: weakref.ref[PreemptionNotice] = weakref.ref(self)
        self._previous = signal.getsignal(signal.SIGTERM)
        self._handler = _make_handler(reference, self._previous)
        signal.signal(signal.SIGTERM, self._handler)
        if watcher is not None:
            threading.Thread(
                target=_poll,
                args=(reference, watcher),
                name="armillary-preemption",
                daemon=True,
            ).start()

    def listen(self) -> None:
        """Installs the handler again, over one that code outside Python installed."""
        # `jax.distributed.initialize` installs one if the program calls it itself.
        if self._is_installed():
            signal.signal(signal.SIGTERM, self._handler)

    def close(self) -> None:
        """Stops listening, and puts the previous handler of SIGTERM back."""
        if self in kept:
            return
        self.is_closed = True
        if self._is_installed():
            # `None` is a handler from outside Python, which cannot be put back.
            signal.signal(signal.SIGTERM, self._previous or signal.SIG_DFL)

    def _is_installed(self) -> bool:
        # Only the main thread may set a handler. After a close from another thread,
        # the handler finds out by itself that the notice is closed.
        is_main = threading.current_thread() is threading.main_thread()
        return is_main and signal.getsignal(signal.SIGTERM) is self._handler


@atexit.register
def _ignore_if_kept() -> None:
    # When Python ends, it replaces its handlers by the default, but leaves an ignored
    # signal ignored. It must not happen earlier, because programs that this one starts
    # would inherit it and ignore SIGTERM too.
    if any(notice._is_installed() for notice in kept):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)


def _make_handler(
    reference: "weakref.ref[PreemptionNotice]", previous: Any
) -> Callable[[int, FrameType | None], None]:
    process = os.getpid()

    def handle(number: int, frame: FrameType | None) -> None:
        # A forked child has inherited the handler, but SIGTERM must still end it.
        notice = reference() if os.getpid() == process else None
        if notice is not None and not notice.is_closed:
            notice.source = notice.source or signal.Signals(number).name
        elif callable(previous):
            previous(number, frame)
        elif previous != signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)

    return handle


def _poll(
    reference: "weakref.ref[PreemptionNotice]", watcher: Callable[[], bool]
) -> None:
    """Runs in a thread: calls the watcher every second, while the notice is in use."""
    has_failed = False
    was_taken = False
    while (notice := reference()) is not None and not notice.is_closed:
        try:
            is_taken = bool(watcher())
            if is_taken and not was_taken:
                notice.source = notice.source or "`watcher`"
            was_taken = is_taken
        except Exception as error:
            if not has_failed:
                logger.warning(
                    "`watcher` of `TerminationConfig` failed. It is called again every "
                    "second, and further failures are not logged: %r",
                    error,
                )
            has_failed = True
        del notice  # A reference during the wait would keep it alive.
        time.sleep(_POLL_SECONDS)
