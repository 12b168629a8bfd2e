"""Iterators that can look at their next item, with or without a thread."""

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


def read_ahead(
    items: Iterator[T], size: int, owner: object
) -> "Peekable[T] | Prefetcher[T]":
    """Returns an iterator that reads up to `size` items ahead in a thread.

    Args:
        items: The items. They must not refer to `owner`.
        size: The number of items; with 0, there is no thread.
        owner: The object that uses the items. The thread ends when it is deleted.
    """
    return Prefetcher(items, size, owner) if size else Peekable(items)


class Peekable(Generic[T]):
    """Iterates over items, and can return the next item without taking it."""

    def __init__(self, items: Iterator[T]) -> None:
        self._items: Iterator[T] | None = items
        self._ready: deque[T] = deque()  # If there is a `current`, it is the first.
        self._has_read_all = False
        self._is_closed = False
        self._error: BaseException | None = None
        self.current: T | None = None
        """The result of `head`, until `pop`."""

    def __iter__(self) -> "Peekable[T]":
        return self

    def __next__(self) -> T:
        item = self.head()
        self.pop()
        return item

    def head(self) -> T:
        """Returns the next item, which is the same until `pop`.

        Raises:
            StopIteration: If the items have ended, or this was closed.
        """
        if not self._ready:
            self._get_ready()
        if self._ready:
            self.current = self._ready[0]
            return self.current
        if self._error is not None:
            raise self._error
        raise StopIteration

    def pop(self) -> None:
        """Removes the item that `head` returned."""
        # ORDER: after an interrupt in between, the same item is returned again.
        self.current = None
        if self._ready:
            self._ready.popleft()

    def read_on(self) -> None:
        """Lets a thread continue, if there is one."""

    @property
    def is_ready(self) -> bool:
        """True if the next item, or the end, needs no waiting."""
        return bool(self._ready) or self._has_read_all

    @property
    def ahead(self) -> T | None:
        """The item that `head` will return, if it has been read."""
        return next(iter(self._ready), None)

    @property
    def has_ended(self) -> bool:
        """True if all items were returned."""
        return self._has_read_all and self._error is None and not self._ready

    def is_coming(self, seconds: float) -> bool:
        """Waits for an item, and returns whether a thread still reads it."""
        del seconds
        return False

    def close(self, timeout_seconds: float | None = None) -> None:
        """Drops the items; those that were read ahead are lost.

        Args:
            timeout_seconds: The longest time to wait for a thread; `None` for any.
        """
        del timeout_seconds
        self._is_closed = True
        self.current = None
        self._ready.clear()
        self._items = None

    def _get_ready(self) -> None:
        """Reads the next item, unless the items have ended."""
        self._read()

    def _read(self) -> None:
        if self._items is None or self._has_read_all or self._is_closed:
            return
        try:
            item = next(self._items)
        # All errors, because a consumer in another thread must not wait forever.
        except BaseException as error:
            self._note_end(None if isinstance(error, StopIteration) else error)
            return
        self._note_item(item)

    def _note_item(self, item: T) -> None:
        self._ready.append(item)

    def _note_end(self, error: BaseException | None) -> None:
        self._has_read_all = True
        self._error = error


class Prefetcher(Peekable[T]):
    """Reads up to `size` items ahead in a thread.

    The thread ends when `owner` is deleted, so the items must not refer to `owner`.
    """

    def __init__(
        self, items: Iterator[T], size: int, owner: object | None = None
    ) -> None:
        super().__init__(items)
        self._size = size
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        # The owner may be collected in any thread, so this does not wait for the end of
        # the reading thread.
        self._finalizer: weakref.finalize[..., Any] | None = (
            None if owner is None else weakref.finalize(owner, self._request_stop)
        )

    def __next__(self) -> T:
        item = super().__next__()
        self.read_on()
        return item

    def _get_ready(self) -> None:
        """Waits for the thread.

        It does not wake the thread later on, which would take the interpreter's lock
        while the caller needs it for the new item.
        """
        if not self._is_closed:
            self._start()
        with self._changed:
            while not (self._ready or self._has_read_all or self._is_closed):
                self._changed.notify_all()
                self._changed.wait()

    def read_on(self) -> None:
        """Wakes the thread, to read until `size` items are ready."""
        with self._changed:
            if not self._is_full():
                self._changed.notify_all()

    def is_coming(self, seconds: float) -> bool:
        with self._changed:
            if self._thread is None or self._is_closed or self.is_ready:
                return False
            self._changed.notify_all()
            self._changed.wait(seconds)
            return not self.is_ready

    def close(self, timeout_seconds: float | None = None) -> None:
        self._request_stop()
        if self._finalizer is not None:
            self._finalizer.detach()  # because it refers to this object
        if self._thread not in (None, threading.current_thread()):
            self._thread.join(timeout_seconds)

    def _is_full(self) -> bool:
        return len(self._ready) - (self.current is not None) >= self._size

    def _request_stop(self) -> None:
        with self._changed:
            self._is_closed = True
            self.current = None
            self._ready.clear()
            if self._thread is None:
                self._items = None  # If there is a thread, it does this at its end.
            self._changed.notify_all()

    def _start(self) -> None:
        if self._thread is None:
            config: Any = jax.config
            settings = (config.jax_enable_x64, config.jax_default_device)
            self._thread = threading.Thread(
                target=self._run, args=settings, name=READER_THREADS, daemon=True
            )
            _running.add(self)
        if self._thread.ident is None:  # The first time, or after an interrupt.
            self._thread.start()

    def _run(self, enable_x64: bool, default_device: Any) -> None:
        with jax.enable_x64(enable_x64), jax.default_device(default_device):
            while True:
                with self._changed:
                    while self._is_full() and not self._is_closed:
                        self._changed.wait()
                    if self._is_closed or self._has_read_all:
                        # This frees the data source, which the iterator refers to.
                        self._items = None
                        return
                self._read()

    def _note_item(self, item: T) -> None:
        with self._changed:
            if not self._is_closed:
                super()._note_item(item)
            self._changed.notify_all()

    def _note_end(self, error: BaseException | None) -> None:
        with self._changed:
            super()._note_end(error)
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
