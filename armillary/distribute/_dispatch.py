"""Bounds how many device programs run ahead of Python.

XLA's CPU client runs the devices of one process on one pool of threads. Two programs
with collectives that are in flight together can each wait for threads the other one
holds, and the process aborts. On several CPU devices a program is therefore started
only when the one before has ended. Other platforms queue programs in order, so Python
may run ahead.
"""

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
        self._is_bounded = (
            mesh is not None
            and mesh.size > 1
            and mesh.devices.flat[0].platform == "cpu"
        )
        self._pending: Any = None
        self._lock = threading.Lock()

    def wait(self) -> None:
        """Waits, where it must, until the last program has ended."""
        if not self._is_bounded:
            return
        with self._lock:
            # A buffer that a later program took over is ready by definition.
            for array in jax.tree.leaves(self._pending):
                if not array.is_deleted():
                    array.block_until_ready()
            self._pending = None

    def started(self, outputs: Any) -> None:
        """Remembers the outputs of a program that was just started."""
        if self._is_bounded:
            with self._lock:
                self._pending = [
                    leaf
                    for leaf in jax.tree.leaves(outputs)
                    if isinstance(leaf, jax.Array) and not isinstance(leaf, Tracer)
                ]
