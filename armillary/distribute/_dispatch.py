"""Bounds how many device programs run ahead of Python.

XLA's CPU client runs the devices of one process on one pool of threads. Two programs
with collectives that run at the same time can each wait for threads that the other one
holds, and the process aborts. So on several CPU devices a program starts only when the
one before has ended. Elsewhere Python may be one program ahead: the
device never waits, and chunks of data do not pile up in its memory.
"""

import collections
import threading
from typing import Any

import jax
from jax.core import Tracer
from jax.sharding import Mesh


class Dispatch:
    """Starts device programs of one strategy.

    Args:
        mesh: The devices, or `None` for a single one.
    """

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
        """Waits until another program may start."""
        with self._lock:
            while len(self._pending) >= self._most_in_flight:
                jax.block_until_ready(self._pending.popleft())

    def in_flight(self) -> list[Any]:
        """Returns the token of the newest program, empty if that has ended."""
        with self._lock:
            newest = self._pending[-1] if self._pending else []
        return [] if all(leaf.is_ready() for leaf in newest) else newest

    def started(self, token: Any) -> None:
        """Remembers a program that was just started."""
        leaves = jax.tree.leaves(token)
        if not _is_traced(leaves):
            with self._lock:
                self._pending.append(leaves)

    def finish(self, value: Any) -> None:
        """Waits for a result, if no program may start before it is ready."""
        leaves = jax.tree.leaves(value)
        if self._most_in_flight == 1 and not _is_traced(leaves):
            jax.block_until_ready(leaves)


def _is_traced(leaves: list[Any]) -> bool:
    return any(isinstance(leaf, Tracer) for leaf in leaves)
