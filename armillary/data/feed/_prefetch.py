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
        return self._channel.get()

    def pop(self) -> None:
        """Lets go of what `head` returned."""
        self._channel.pop()

    @property
    def current(self) -> T | None:
        """What `head` returned, until `pop`."""
        return self._channel.current

    def read_on(self) -> None:
        """Wakes the thread up, to read until `size` items are there."""
        self._channel.read_on()

    @property
    def is_ready(self) -> bool:
        """Whether the next item, or the end, is there without waiting."""
        return self._channel.is_ready

    @property
    def ahead(self) -> T | None:
        """What `head` is going to return, if it has been read."""
        return self._channel.ahead

    @property
    def has_ended(self) -> bool:
        """Whether all items were given out."""
        return self._channel.is_over

    def is_coming(self, seconds: float) -> bool:
        """Waits that long for an item; returns whether the thread still reads it."""
        return self._channel.is_coming(seconds)

    def close(self, timeout_seconds: float | None = None) -> None:
        """Ends the thread and waits for it; what was read ahead is lost."""
        self._channel.request_stop()
        self._channel.join(timeout_seconds)


class _Channel(Generic[T]):
    """The state that the thread and its consumer share."""

    def __init__(self, items: Iterator[T], size: int) -> None:
        self._items: Iterator[T] | None = items
        self._size = size
        self._ready: deque[T] = deque()  # `current` is the first of them.
        self.current: T | None = None
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._should_stop = False
        self._has_ended = False
        self._error: BaseException | None = None

    def get(self) -> T:
        if not self._size and not self._ready:
            self._read()
        elif self._size and not self._should_stop:
            self._start()
        with self._changed:
            while not (self._ready or self._has_ended or self._should_stop):
                self._changed.notify_all()
                self._changed.wait()
            if self._ready:
                self.current = self._ready[0]
                return self.current
            if self._error is not None:
                raise self._error
            raise StopIteration

    def pop(self) -> None:
        # ORDER: an interrupt in between gives the item out again, and loses none.
        self.current = None
        if self._ready:
            self._ready.popleft()

    def read_on(self) -> None:
        with self._changed:
            if not self._is_full():
                self._changed.notify_all()

    @property
    def is_ready(self) -> bool:
        return bool(self._ready) or self._has_ended

    @property
    def ahead(self) -> T | None:
        return next(iter(self._ready), None)

    @property
    def is_over(self) -> bool:
        return self._has_ended and self._error is None and not self._ready

    def is_coming(self, seconds: float) -> bool:
        with self._changed:
            if self._thread is None or self._should_stop or self.is_ready:
                return False
            self._changed.notify_all()
            self._changed.wait(seconds)
            return not self.is_ready

    def _is_full(self) -> bool:
        return len(self._ready) - (self.current is not None) >= self._size

    def request_stop(self) -> None:
        with self._changed:
            self._should_stop, self.current = True, None
            self._ready.clear()
            self._changed.notify_all()

    def join(self, timeout_seconds: float | None) -> None:
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout_seconds)

    def _start(self) -> None:
        """Starts the thread, unless it was."""
        if self._thread is None:
            config: Any = jax.config
            self._thread = threading.Thread(
                target=self._run,
                args=(config.jax_enable_x64, config.jax_default_device),
                name=READER_THREADS,
                daemon=True,
            )
            _running.add(self)
        if self._thread.ident is None:
            self._thread.start()

    def _run(self, enable_x64: bool, default_device: Any) -> None:
        with jax.enable_x64(enable_x64), jax.default_device(default_device):
            self._read_ahead()

    def _read_ahead(self) -> None:
        while True:
            with self._changed:
                while self._is_full() and not self._should_stop:
                    self._changed.wait()
                if self._should_stop or self._has_ended:
                    # The iterator holds the data source; let go of it here, so that
                    # its own resources are freed.
                    self._items = None
                    return
            self._read()

    def _read(self) -> None:
        """Reads one item, or notes the end or the error."""
        if self._items is None or self._has_ended or self._should_stop:
            return
        try:
            item = next(self._items)
        except StopIteration:
            self._end(None)
        except BaseException as error:
            # Whatever it is, the consumer must not wait for ever.
            self._end(error)
        else:
            with self._changed:
                if not self._should_stop:
                    self._ready.append(item)
                self._changed.notify_all()

    def _end(self, error: BaseException | None) -> None:
        with self._changed:
            self._has_ended, self._error = True, error
            self._changed.notify_all()


_running: weakref.WeakSet[_Channel] = weakref.WeakSet()


@atexit.register
def _stop_all() -> None:
    """Ends all threads while the interpreter and JAX still work."""
    channels = list(_running)
    for channel in channels:
        channel.request_stop()
    for channel in channels:
        channel.join(_EXIT_TIMEOUT_SECONDS)
