"""The batches of a source: their positions, and threads that read them ahead."""

import atexit
import base64
import copy
import itertools
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

import jax
import numpy as np

from armillary._checks import list_lines
from armillary._process import READER_THREADS
from armillary.data.sources._batch import as_device_values, check_batch
from armillary.data.sources._source import IterableSource, Source
from armillary.data.sources._stale import explaining_deleted_arrays
from armillary.errors import DatasetStateError
from armillary.typing import PyTree

T = TypeVar("T")

_EXIT_TIMEOUT_SECONDS = 5.0


@dataclass(frozen=True)
class Position:
    """A place between two batches."""

    epoch: int = 0  # the number of the pass over the source
    source: Any = None  # the source's own state; None at the start of a pass
    full_size: int | None = None  # the size of the first batch, for `remainder`
    is_exhausted: bool = False  # whether the pass is over

    @property
    def is_between_passes(self) -> bool:
        """True if the position does not depend on the order of the data."""
        return self.source is None or self.is_exhausted


def encode_position(position: Position, kind: str) -> dict[str, Any]:
    """Returns `position` as a dictionary that `json.dumps` accepts."""
    return {
        "kind": kind,
        "epoch": position.epoch,
        "source": _encode(position.source, kind),
        "exhausted": position.is_exhausted,
        "full_size": position.full_size,
    }


def decode_position(state: Mapping[str, Any], kind: str) -> Position:
    if state.get("kind") != kind:
        raise DatasetStateError(
            f"`state` was saved from another kind of source: {state.get('kind')}, and "
            f"not {kind}. Build the dataset from the same kind of source, or leave it "
            "out of the checkpoint."
        )
    source = _decode(state["source"])
    return Position(state["epoch"], source, state["full_size"], state["exhausted"])


def check_same_order(saved: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    """Raises if a position belongs to another order of examples than the program's."""
    # Only values that both have are compared, because older releases saved fewer.
    lines = [
        f"{name}: {saved[name]} in the state, {own[name]} in the program"
        for name in own
        if name in saved and saved[name] != own[name]
    ]
    if lines:
        raise DatasetStateError(
            "`state` was saved from other data, or from another order of the data, so "
            f"its position would be wrong here:\n{list_lines(lines)}\n"
            "Pass the data and the seed that the state was saved with. To continue "
            "from a checkpoint with other data, from its beginning, name the object "
            "that holds the state in the manager: "
            '`CheckpointManager(..., may_differ="trainer")`.'
        )


def _encode(value: Any, kind: str) -> Any:
    match value:
        case None | bool() | int() | float() | str():
            return value
        case bytes():
            return {"__bytes__": base64.b64encode(value).decode("ascii")}
        case np.generic():
            return value.item()
        case np.ndarray():
            return {"__array__": value.tolist(), "dtype": str(value.dtype)}
        case list():
            return [_encode(item, kind) for item in value]
        case tuple():
            return {"__tuple__": [_encode(item, kind) for item in value]}
        case dict() if all(isinstance(key, str) for key in value):
            return {key: _encode(item, kind) for key, item in value.items()}
    raise DatasetStateError(
        f"`get_state` of the source ({kind}) returned {value!r:.80} of type "
        f"{type(value).__name__}, which a position cannot hold. Return numbers, "
        "strings, bytes, arrays, and lists and dictionaries of them."
    )


def _decode(value: Any) -> Any:
    match value:
        case list():
            return [_decode(item) for item in value]
        case {"__bytes__": text, **rest} if not rest:
            return base64.b64decode(text)
        case {"__array__": items, "dtype": dtype, **rest} if not rest:
            return np.array(items, dtype)
        case {"__tuple__": items, **rest} if not rest:
            return tuple(_decode(items))
        case dict():
            return {key: _decode(item) for key, item in value.items()}
    return value


class SourceBatch(NamedTuple):
    """A batch of a source, and the position after it."""

    arrays: PyTree
    position: Position


def read_batches(
    source: Source, position: Position, note: Callable[[SourceBatch], None]
) -> "Prefetcher[SourceBatch]":
    """Returns the batches of one pass from a position on, and calls `note` for each."""
    if position.is_exhausted:
        if position.source is not None and isinstance(source, IterableSource):
            source.finish(position.source)
        return Prefetcher(iter(()), 0)
    iterator = source.make_iterator(position.epoch)
    if position.source is not None:
        try:
            # A copy, because iterators may keep the state and change it.
            iterator.set_state(copy.deepcopy(position.source))
        except DatasetStateError:
            raise
        except Exception as error:
            raise DatasetStateError(
                f"`state` does not fit the source ({source.name}).\n"
                f"  in the state:    {position.source!r:.300}\n"
                f"  the source says: {type(error).__name__}: {error}\n"
                "Build the data set in the same way as when the state was saved, or "
                "leave the dataset out of the checkpoint."
            ) from error
    has_positions = source.is_repositionable

    def read() -> Iterator[SourceBatch]:
        full_size = source.full_size or position.full_size
        for number in itertools.count():

            def get_name(number: int = number) -> str:
                return f"Batch {number} of the source ({source.name})"

            try:
                with explaining_deleted_arrays(get_name):
                    raw = next(iterator)
            except StopIteration:
                return
            arrays, num_rows = check_batch(raw, get_name)
            if num_rows:
                arrays = as_device_values(arrays, get_name)
                full_size = full_size or num_rows
                state = iterator.get_state() if has_positions else None
                batch = SourceBatch(arrays, Position(position.epoch, state, full_size))
                note(batch)
                yield batch

    return Prefetcher(read(), 0)


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
