"""Limits the number of device programs that are in flight, and delays signals.

XLA's CPU client runs the devices of one process on one pool of threads. There, two
programs with collectives can wait for each other forever. So on several CPU devices, a
program starts only when the previous program has ended. On other devices, one more
program may be started before that.

A compiled step donates the memory of its state and returns the new state. If a signal's
handler raised an exception between the two, the user's arrays would be lost.
"""

import collections
import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from importlib import import_module
from types import FrameType
from typing import Any

import jax
from jax.core import Tracer
from jax.sharding import Mesh

from armillary.lifeline._lifeline import waiting


class Dispatch:
    """Starts device programs of one strategy, on a mesh or one device."""

    def __init__(self, mesh: Mesh | None) -> None:
        is_cpu_mesh = False
        if mesh is not None and mesh.size > 1:
            is_cpu_mesh = mesh.devices.flat[0].platform == "cpu"
        self._most_in_flight = 1 if is_cpu_mesh else 2
        # The results of each program in flight, the oldest program first.
        self._pending: collections.deque[Any] = collections.deque()
        self._lock = threading.Lock()

    def wait(self) -> None:
        """Waits until another program may start."""
        with self._lock:
            while len(self._pending) >= self._most_in_flight:
                with waiting():
                    jax.block_until_ready(self._pending.popleft())

    def in_flight(self) -> list[Any]:
        """Returns the token of the newest program, empty if that has ended."""
        with self._lock:
            newest = self._pending[-1] if self._pending else []
        return [] if all(leaf.is_ready() for leaf in newest) else newest

    def started(self, token: Any) -> None:
        """Notes that a program has started, with a result that shows its end."""
        leaves = jax.tree.leaves(token)
        if not _is_traced(leaves):
            with self._lock:
                self._pending.append(leaves)

    def finish(self, value: Any) -> None:
        """Waits for a result, if no program may start before it is ready."""
        leaves = jax.tree.leaves(value)
        if self._most_in_flight == 1 and not _is_traced(leaves):
            with waiting():
                jax.block_until_ready(leaves)


def _is_traced(leaves: list[Any]) -> bool:
    return any(isinstance(leaf, Tracer) for leaf in leaves)


_NAMES = ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGALRM", "SIGUSR1", "SIGUSR2")
_NUMBERS = [int(getattr(signal, name)) for name in _NAMES if hasattr(signal, name)]

# This code runs at every loop. The functions of `signal` take ten times as long as the
# interpreter's own functions, because they turn each number and handler into an enum.
get_handler: Callable[[int], Any] = import_module("_signal").getsignal
set_handler: Callable[[int, Any], Any] = import_module("_signal").signal


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Delays signals with handlers in Python until the end of a block."""
    # Python delivers signals only to the main thread, so other threads are safe.
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    is_done = False
    caught: dict[int, FrameType | None] = {}

    def delay(number: int, frame: FrameType | None) -> None:
        if is_done:
            handlers[number](number, frame)
        else:
            caught.setdefault(number, frame)

    found = [(number, get_handler(number)) for number in _NUMBERS]
    handlers = {number: handler for number, handler in found if callable(handler)}
    try:
        for number in handlers:
            set_handler(number, delay)
        yield
    finally:
        # From here on, `delay` calls the old handler. If that raises, a `delay` that
        # remains installed still forwards all signals.
        is_done = True
        for number, handler in handlers.items():
            set_handler(number, handler)
        if caught:
            # With an `ExitStack`, all handlers run, even if one of them raises.
            with contextlib.ExitStack() as stack:
                for number, frame in reversed(caught.items()):
                    stack.callback(handlers[number], number, frame)
