"""Bounds how many device programs run ahead of Python, and when signals are heard.

XLA's CPU client runs the devices of one process on one pool of threads, where two
programs with collectives can wait for each other forever. So on several CPU devices a
program starts only when the one before has ended. Elsewhere Python may be one ahead.

A compiled step takes over (donates) the memory of its state and returns the new one. An
exception between the two, as of a signal's handler, would lose the user's arrays.
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
        is_cpu_mesh = (
            mesh is not None
            and mesh.size > 1
            and mesh.devices.flat[0].platform == "cpu"
        )
        self._most_in_flight = 1 if is_cpu_mesh else 2
        self._pending: collections.deque[Any] = collections.deque()
        self._lock = threading.Lock()

    def wait(self) -> None:
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

# This runs at every loop. The functions of `signal` take ten times as long, since they
# look for an enum of each number and handler; below them are the interpreter's own.
get_handler: Callable[[int], Any] = import_module("_signal").getsignal
set_handler: Callable[[int, Any], Any] = import_module("_signal").signal


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Puts off signals that have handlers in Python until the code under it is done."""
    # Python delivers signals to the main thread, so that others are safe already.
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    is_done = False
    caught: dict[int, FrameType | None] = {}

    def put_off(number: int, frame: FrameType | None) -> None:
        if is_done:
            handlers[number](number, frame)
        else:
            caught.setdefault(number, frame)

    found = [(number, get_handler(number)) for number in _NUMBERS]
    handlers = {number: handler for number, handler in found if callable(handler)}
    try:
        for number in handlers:
            set_handler(number, put_off)
        yield
    finally:
        # From here on `put_off` may raise: one that then stays behind passes all on.
        is_done = True
        for number, handler in handlers.items():
            set_handler(number, handler)
        if caught:
            with contextlib.ExitStack() as stack:  # None is lost if another raises.
                for number, frame in reversed(caught.items()):
                    stack.callback(handlers[number], number, frame)
