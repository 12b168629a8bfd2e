"""The time in which a loop waits for data, apart from that of its steps.

Python reads ahead of the device. While the device still runs steps, waiting for the
next ones costs nothing: only what remains after their end is counted as waiting.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

from armillary.data.feed._feed import Feed
from armillary.distribute._strategy import Strategy
from armillary.goodput._category import Category
from armillary.goodput._stopwatch import get_stopwatch

# How often the device is looked at. Data that comes ends the wait at once.
_POLL_SECONDS = 0.002


@contextlib.contextmanager
def waiting_for_data(feed: Feed[Any], strategy: Strategy) -> Iterator[None]:
    """Counts a block that reads the first batches or the next chunk from a feed.

    Where this thread reads it, the whole block counts as waiting if the device has
    ended before it.
    """
    stopwatch, dispatch = get_stopwatch(), strategy.dispatch
    if stopwatch is not None:
        stopwatch.moves += 1
    if stopwatch is None or feed.is_ready:
        yield
        return
    while dispatch.in_flight() and feed.is_coming(_POLL_SECONDS):
        pass
    category = stopwatch.category
    with stopwatch.phase(Category.DATA):
        yield
        if dispatch.in_flight():
            stopwatch.category = category
