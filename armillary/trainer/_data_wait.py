"""Records how long the device waits for data."""

import contextlib
from collections.abc import Iterator
from typing import Any

from armillary.data.feed._ahead import Peekable
from armillary.distribute._strategy import Strategy
from armillary.goodput._stopwatch import Category, get_stopwatch
from armillary.lifeline._lifeline import waiting

# The interval at which the device is checked. The wait ends when data arrives.
_POLL_SECONDS = 0.002


@contextlib.contextmanager
def waiting_for_data(queue: Peekable[Any] | None, strategy: Strategy) -> Iterator[None]:
    """Records how long the device is idle in a block that reads from a queue."""
    stopwatch = get_stopwatch()
    dispatch = strategy.dispatch
    if stopwatch is not None:
        stopwatch.moves += 1
    if stopwatch is None or (queue is not None and queue.is_ready):
        yield
        return

    # While the device has steps to run, it does not wait for data.
    while queue is not None and dispatch.in_flight():
        with waiting():
            is_coming = queue.is_coming(_POLL_SECONDS)
        if not is_coming:
            break

    category = stopwatch.category
    with stopwatch.phase(Category.DATA):
        yield
        if dispatch.in_flight():
            stopwatch.category = category
