"""Keeps Ctrl-C away from the moment in which state has no owner.

A compiled step takes over (donates) the memory of its state and returns the new one. An
interrupt between the two would leave the user's model with arrays that are gone.
"""

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Puts off SIGINT until the code under it is done; in the main thread only.

    Python delivers signals to the main thread, so that others are safe already.
    """
    before = signal.getsignal(signal.SIGINT)
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or not callable(before):
        yield
        return
    caught: list[tuple[int, FrameType | None]] = []
    signal.signal(signal.SIGINT, lambda number, frame: caught.append((number, frame)))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if caught:
            before(*caught[0])
