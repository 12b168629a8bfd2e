"""Reads ahead in a background thread."""

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

    A `size` of 0 reads in the caller's thread. Any other starts a thread with the first
    `next`, which has the JAX settings that hold there: those of `with
    jax.enable_x64(True):` belong to one thread. It ends when nobody holds `owner`,
    which the items may not hold. An error is raised by the `next` that would have
    returned the item, and again by every later one.

    Attributes:
        current: What `head` returned, until `pop`.
    """

    def __init__(
        self, items: Iterator[T], size: int, owner: object | None = None
    ) -> None:
        self._items: Iterator[T] | None = items
        self._size = size
        self._ready: deque[T] = deque()  # `current` is the first of them.
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._has_read_all = self._is_closed = False
        self._error: BaseException | None = None
        self.current: T | None = None
        # Collection may happen anywhere: it asks the thread to end, and goes on.
        self._finalizer: weakref.finalize[..., Any] | None = (
            None if owner is None else weakref.finalize(owner, self._request_stop)
        )

    def __iter__(self) -> "Prefetcher[T]":
        return self

    def __next__(self) -> T:
        item = self.head()
        self.pop()
        if self._size:
            self.read_on()
        return item

    def head(self) -> T:
        """Returns the next item, the same one until `pop`; leaves the thread asleep.

        A thread that wakes up takes the interpreter from the one that has just got its
        item. So the next item is read when `read_on` is called, or one is missing.
        """
        if not self._ready and not self._size:
            self._read()
        elif not self._ready:
            self._wait()
        if self._ready:
            self.current = self._ready[0]
            return self.current
        if self._error is not None:
            raise self._error
        raise StopIteration

    def _wait(self) -> None:
        if not self._is_closed:
            self._start()
        with self._changed:
            while not (self._ready or self._has_read_all or self._is_closed):
                self._changed.notify_all()
                self._changed.wait()

    def pop(self) -> None:
        """Lets go of what `head` returned."""
        # ORDER: an interrupt in between gives the item out again, and loses none.
        self.current = None
        if self._ready:
            self._ready.popleft()

    def read_on(self) -> None:
        """Wakes the thread up, to read until `size` items are there."""
        with self._changed:
            if not self._is_full():
                self._changed.notify_all()

    @property
    def is_ready(self) -> bool:
        """Whether the next item, or the end, is there without waiting."""
        return bool(self._ready) or self._has_read_all

    @property
    def ahead(self) -> T | None:
        """What `head` is going to return, if it has been read."""
        return next(iter(self._ready), None)

    @property
    def has_ended(self) -> bool:
        """Whether all items were given out."""
        return self._has_read_all and self._error is None and not self._ready

    def is_coming(self, seconds: float) -> bool:
        """Waits that long for an item; returns whether the thread still reads it."""
        with self._changed:
            if self._thread is None or self._is_closed or self.is_ready:
                return False
            self._changed.notify_all()
            self._changed.wait(seconds)
            return not self.is_ready

    def close(self, timeout_seconds: float | None = None) -> None:
        """Ends the thread and waits for it; what was read ahead is lost."""
        self._request_stop()
        if self._finalizer is not None:
            self._finalizer.detach()  # It holds this object.
        if self._thread not in (None, threading.current_thread()):
            self._thread.join(timeout_seconds)

    def _is_full(self) -> bool:
        return len(self._ready) - (self.current is not None) >= self._size

    def _request_stop(self) -> None:
        with self._changed:
            self._is_closed, self.current = True, None
            self._ready.clear()
            if self._thread is None:
                self._items = None  # A thread does that when it ends.
            self._changed.notify_all()

    def _start(self) -> None:
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
            while True:
                with self._changed:
                    while self._is_full() and not self._is_closed:
                        self._changed.wait()
                    if self._is_closed or self._has_read_all:
                        # The iterator holds the data source, which is freed here.
                        self._items = None
                        return
                self._read()

    def _read(self) -> None:
        """Reads one item, or notes the end or the error."""
        if self._items is None or self._has_read_all or self._is_closed:
            return
        try:
            item = next(self._items)
        # Whatever it is, the consumer must not wait for ever.
        except BaseException as error:
            with self._changed:
                self._has_read_all = True
                self._error = None if isinstance(error, StopIteration) else error
                self._changed.notify_all()
            return
        with self._changed:
            if not self._is_closed:
                self._ready.append(item)
            self._changed.notify_all()


_running: weakref.WeakSet[Prefetcher[Any]] = weakref.WeakSet()


@atexit.register
def _stop_all() -> None:
    """Ends all threads while the interpreter and JAX still work."""
    queues = list(_running)
    for queue in queues:
        queue.close(0.0)
    for queue in queues:
        queue.close(_EXIT_TIMEOUT_SECONDS)
