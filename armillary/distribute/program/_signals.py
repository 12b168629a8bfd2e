"""Keeps Ctrl-C away from the moment in which state has no owner.

A compiled step takes over (donates) the memory of its state and returns the new one. An
exception between the two, which a signal's handler may raise, would leave the user's
model with arrays that are gone.
"""

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from importlib import import_module
from types import FrameType
from typing import Any

_NAMES = ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGALRM", "SIGUSR1", "SIGUSR2")
_NUMBERS = [int(getattr(signal, name)) for name in _NAMES if hasattr(signal, name)]

# This runs at every loop. The functions of `signal` take ten times as long, since they
# look for an enum of each number and handler; below them are the interpreter's own.
get_handler: Callable[[int], Any] = import_module("_signal").getsignal
set_handler: Callable[[int, Any], Any] = import_module("_signal").signal


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Puts off signals until the code under it is done; in the main thread only.

    These are the signals that programs are stopped or asked by, if they have handlers
    in Python. Python delivers signals to the main thread, so that others are safe
    already.
    """
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
