"""A background thread that keeps the next inputs on the device."""

import contextlib
import queue
import threading
import weakref
from collections.abc import Callable, Iterable
from typing import Any


class Prefetch:
    """Reads and places inputs ahead of their use.

    The thread ends with this object, or before the interpreter does: a thread that is
    cut off while it places an array would take the process down.

    Args:
        source: The inputs to read; it never ends.
        place: Puts what was read on the device.
        depth: Inputs that wait at most.
    """

    def __init__(
        self, source: Iterable[Any], place: Callable[[Any], Any], depth: int
    ) -> None:
        self._queue: queue.Queue[Any] = queue.Queue(depth)
        stop = threading.Event()
        thread = threading.Thread(
            target=_fill,
            args=(self._queue, stop, source, place),
            daemon=True,
            name="prefetch",
        )
        thread.start()
        weakref.finalize(self, _stop, self._queue, stop, thread)

    def __next__(self) -> Any:
        item = self._queue.get()
        if isinstance(item, Exception):
            raise item
        return item


def _fill(
    waiting: queue.Queue[Any],
    stop: threading.Event,
    source: Iterable[Any],
    place: Callable[[Any], Any],
) -> None:
    try:
        for item in source:
            waiting.put(place(item))
            if stop.is_set():
                return
    except Exception as error:  # It belongs to the thread that waits.
        waiting.put(error)


def _stop(
    waiting: queue.Queue[Any], stop: threading.Event, thread: threading.Thread
) -> None:
    stop.set()
    while thread.is_alive() and thread is not threading.current_thread():
        with contextlib.suppress(queue.Empty):
            waiting.get_nowait()  # The thread may wait for room.
        thread.join(0.01)
