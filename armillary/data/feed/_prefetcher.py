"""Reads items ahead in a background thread."""

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
    """Iterates over `items`, and reads up to `size` of them ahead in a thread.

    With `size=0`, there is no thread. The thread ends when `owner` is deleted, so the
    items must not refer to `owner`.
    """

    def __init__(
        self, items: Iterator[T], size: int, owner: object | None = None
    ) -> None:
        self._items: Iterator[T] | None = items
        self._size = size
        self._ready: deque[T] = deque()  # If there is a `current`, it is the first.
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._has_read_all = False
        self._is_closed = False
        self._error: BaseException | None = None
        self.current: T | None = None  # the result of `head`, until `pop`
        # The owner may be collected in any thread, so this does not wait for the end of
        # the reading thread.
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
        """Returns the next item, which is the same until `pop`.

        It does not wake the thread, which would take the interpreter's lock while the
        caller needs it for the new item.
        """
        if not self._ready and not self._size:
            self._read()
        elif not self._ready:
            if not self._is_closed:
                self._start()
            with self._changed:
                while not (self._ready or self._has_read_all or self._is_closed):
                    self._changed.notify_all()
                    self._changed.wait()
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
        """Wakes the thread, to read until `size` items are ready."""
        with self._changed:
            if not self._is_full():
                self._changed.notify_all()

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
        """Waits up to `seconds` for an item; returns whether it is still being read."""
        with self._changed:
            if self._thread is None or self._is_closed or self.is_ready:
                return False
            self._changed.notify_all()
            self._changed.wait(seconds)
            return not self.is_ready

    def close(self, timeout_seconds: float | None = None) -> None:
        """Ends the thread and waits for it; items that were read ahead are lost."""
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

    def _read(self) -> None:
        if self._items is None or self._has_read_all or self._is_closed:
            return
        try:
            item = next(self._items)
        # All errors, because the consumer must not wait forever.
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
