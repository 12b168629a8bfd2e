"""Reads ahead in a background thread.

The thread knows its channel and the iterator it drains, never the `Prefetcher`. So a
`Prefetcher` that nobody holds any more is collected, and that ends its thread.
"""

import atexit
import threading
import weakref
from collections import deque
from collections.abc import Iterator
from typing import Any, Generic, TypeVar

import jax

from armillary._process import READER_THREADS

T = TypeVar("T")

_EXIT_TIMEOUT_SECONDS = 5.0


class Prefetcher(Generic[T]):
    """Iterates over `items`, reading up to `size` of them ahead.

    The thread starts with the first `next`, and has the JAX settings that hold there:
    those of `with jax.enable_x64(True):` belong to one thread. An exception in `items`
    is raised by the `next` that would have returned the item, with its traceback, and
    again by every later one.

    Args:
        items: Iterator that only this object uses from now on.
        size: How many items to read ahead. 0 reads in the caller's thread.
    """

    def __init__(self, items: Iterator[T], size: int) -> None:
        self._channel: _Channel[T] = _Channel(items, size)
        # Collection may happen anywhere: it asks the thread to end, but does not wait.
        weakref.finalize(self, self._channel.request_stop)

    def __iter__(self) -> "Prefetcher[T]":
        return self

    def __next__(self) -> T:
        item = self.head()
        self.pop()
        self.read_on()
        return item

    def head(self) -> T:
        """Returns the next item, the same one until `pop`; leaves the thread asleep.

        A thread that wakes up takes the interpreter from the one that has just got its
        item. So the next item is read when `read_on` is called, or one is missing.
        """
        channel = self._channel
        if not channel.size and not channel.ready:
            channel.read()
        elif channel.size and not channel.should_stop:
            channel.start()
        with channel.changed:
            while not (channel.ready or channel.has_ended or channel.should_stop):
                channel.changed.notify_all()
                channel.changed.wait()
            if channel.ready:
                channel.current = channel.ready[0]
                return channel.current
            if channel.error is not None:
                raise channel.error
            raise StopIteration

    def pop(self) -> None:
        """Lets go of what `head` returned."""
        # ORDER: an interrupt in between gives the item out again, and loses none.
        self._channel.current = None
        if self._channel.ready:
            self._channel.ready.popleft()

    @property
    def current(self) -> T | None:
        """What `head` returned, until `pop`."""
        return self._channel.current

    def read_on(self) -> None:
        """Wakes the thread up, to read until `size` items are there."""
        with self._channel.changed:
            if not self._channel.is_full():
                self._channel.changed.notify_all()

    @property
    def is_ready(self) -> bool:
        """Whether the next item, or the end, is there without waiting."""
        return bool(self._channel.ready) or self._channel.has_ended

    @property
    def ahead(self) -> T | None:
        """What `head` is going to return, if it has been read."""
        return next(iter(self._channel.ready), None)

    @property
    def has_ended(self) -> bool:
        """Whether all items were given out."""
        channel = self._channel
        return channel.has_ended and channel.error is None and not channel.ready

    def is_coming(self, seconds: float) -> bool:
        """Waits that long for an item; returns whether the thread still reads it."""
        channel = self._channel
        with channel.changed:
            if channel.thread is None or channel.should_stop or self.is_ready:
                return False
            channel.changed.notify_all()
            channel.changed.wait(seconds)
            return not self.is_ready

    def close(self, timeout_seconds: float | None = None) -> None:
        """Ends the thread and waits for it; what was read ahead is lost."""
        self._channel.request_stop()
        self._channel.join(timeout_seconds)


class _Channel(Generic[T]):
    """The state that the thread and its consumer share."""

    def __init__(self, items: Iterator[T], size: int) -> None:
        self._items: Iterator[T] | None = items
        self.size = size
        self.ready: deque[T] = deque()  # `current` is the first of them.
        self.current: T | None = None
        self.changed = threading.Condition()
        self.thread: threading.Thread | None = None
        self.should_stop = False
        self.has_ended = False
        self.error: BaseException | None = None

    def is_full(self) -> bool:
        return len(self.ready) - (self.current is not None) >= self.size

    def request_stop(self) -> None:
        with self.changed:
            self.should_stop, self.current = True, None
            self.ready.clear()
            self.changed.notify_all()

    def join(self, timeout_seconds: float | None) -> None:
        thread = self.thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout_seconds)

    def start(self) -> None:
        """Starts the thread, unless it was."""
        if self.thread is None:
            config: Any = jax.config
            self.thread = threading.Thread(
                target=self._run,
                args=(config.jax_enable_x64, config.jax_default_device),
                name=READER_THREADS,
                daemon=True,
            )
            _running.add(self)
        if self.thread.ident is None:
            self.thread.start()

    def _run(self, enable_x64: bool, default_device: Any) -> None:
        with jax.enable_x64(enable_x64), jax.default_device(default_device):
            self._read_ahead()

    def _read_ahead(self) -> None:
        while True:
            with self.changed:
                while self.is_full() and not self.should_stop:
                    self.changed.wait()
                if self.should_stop or self.has_ended:
                    # The iterator holds the data source; let go of it here, so that
                    # its own resources are freed.
                    self._items = None
                    return
            self.read()

    def read(self) -> None:
        """Reads one item, or notes the end or the error."""
        if self._items is None or self.has_ended or self.should_stop:
            return
        try:
            item = next(self._items)
        except StopIteration:
            self._end(None)
        except BaseException as error:
            # Whatever it is, the consumer must not wait for ever.
            self._end(error)
        else:
            with self.changed:
                if not self.should_stop:
                    self.ready.append(item)
                self.changed.notify_all()

    def _end(self, error: BaseException | None) -> None:
        with self.changed:
            self.has_ended, self.error = True, error
            self.changed.notify_all()


_running: weakref.WeakSet[_Channel] = weakref.WeakSet()


@atexit.register
def _stop_all() -> None:
    """Ends all threads while the interpreter and JAX still work."""
    channels = list(_running)
    for channel in channels:
        channel.request_stop()
    for channel in channels:
        channel.join(_EXIT_TIMEOUT_SECONDS)
