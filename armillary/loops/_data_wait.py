"""Counts the time in which a loop has no data, apart from that of its steps.

Python reads ahead of the device. While the device still runs steps, waiting for the
next ones costs nothing: only what remains after their end is counted as waiting.
"""

import contextlib
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax

from armillary.data._feed import Feed
from armillary.distribute import Strategy
from armillary.goodput import Category, get_stopwatch

_executor: ThreadPoolExecutor | None = None


@contextlib.contextmanager
def waiting_for_data(feed: Feed, strategy: Strategy) -> Iterator[None]:
    """Counts a block that reads the next chunk.

    Args:
        feed: What it reads from.
        strategy: Knows what its devices run meanwhile.
    """
    stopwatch = get_stopwatch()
    if stopwatch is not None:
        stopwatch.moves += 1
    if stopwatch is None or stopwatch.category is None or feed.is_ready:
        yield
        return
    running = strategy.dispatch.in_flight()
    if running:
        stopwatch.run_on_device(stopwatch.category, _watch(running))
    with stopwatch.phase(Category.DATA):
        yield


@contextlib.contextmanager
def reading() -> Iterator[None]:
    """Counts a block that reads data while the device has nothing to do."""
    stopwatch = get_stopwatch()
    if stopwatch is None:
        yield
        return
    with stopwatch.phase(Category.DATA):
        yield


def _watch(running: list[Any]) -> Callable[[], float | None]:
    """Returns what tells when a program ended, `None` before, and 0 if it failed."""

    def wait() -> float:
        jax.block_until_ready(running)
        return time.perf_counter()

    end = _get_executor().submit(wait)

    def ended() -> float | None:
        if not end.done():
            return None
        return 0.0 if end.exception() else end.result()

    return ended


def _get_executor() -> ThreadPoolExecutor:
    global _executor
    if _executor is None:
        _executor = ThreadPoolExecutor(1, "armillary-data-wait")
    return _executor
