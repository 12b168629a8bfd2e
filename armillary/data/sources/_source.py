"""The protocol of all sources, and sources from iterables, functions and iterators."""

import copy
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol, TypeVar, runtime_checkable

import jax
import numpy as np

from armillary._logging import logger
from armillary.data.sources._batch import as_numpy
from armillary.errors import DatasetStateError
from armillary.typing import Batch

POSITION = ("get_state", "set_state")
"""The methods of iterators that have positions."""
MAY_BE_MISSING = "may_be_missing"
IS_POSITION = "is_position"
_Method = TypeVar("_Method", bound=Callable[..., Any])


class SourceIterator(Protocol):
    """One pass over a source. Used by one thread at a time."""

    def __next__(self) -> Batch:
        """Returns the next batch, whose arrays must never change afterwards."""

    def get_state(self) -> Any:
        """Returns the position after the last batch, in types of JSON, or bytes.

        It is called only if the source is repositionable. The result must not change
        when the iterator continues.
        """

    def set_state(self, state: Any) -> None:
        """Goes to a position that `get_state` returned, perhaps in another process."""


@runtime_checkable
class Source(Protocol):
    """A source of batches, which can be read any number of times."""

    name: str
    """The kind of source. A restored position must be from the same kind."""

    @property
    def is_repositionable(self) -> bool:
        """True if its iterators have positions."""
        ...

    @property
    def full_size(self) -> int | None:
        """The examples in every batch except perhaps the last; None if unknown."""

    def make_iterator(self, epoch: int) -> SourceIterator:
        """Returns an iterator from the start of pass `epoch`, counted from 0."""
        ...


class IterableSource:
    """A source that calls `make` for the iterator of every pass.

    With `copies`, batches are copied, because they may share one buffer. With
    `keeps_order`, the order of a pass depends on the position at the end of the last
    pass. With `is_shared`, the iterators of all passes move one object.
    """

    full_size = None

    def __init__(
        self,
        make: Callable[[int], Any],
        name: str,
        *,
        copies: bool = True,
        is_repositionable: bool | None = None,
        keeps_order: bool = False,
        is_shared: bool = False,
    ) -> None:
        self.name = name
        # The known facts about the data.
        self.is_endless = False
        self.num_batches: int | None = None
        # The values that give a position its meaning.
        self.order_of_examples: dict[str, Any] = {}
        # Returns an `IndexedDataset` of the same batches and positions.
        self.by_number: Callable[[], Any] | None = None
        self._make = make
        self._copies = copies
        self._keeps_order = keeps_order
        self._is_repositionable = is_repositionable
        self._unused: Any = None
        self._turn = Turn() if is_shared else None

    @property
    def is_repositionable(self) -> bool:
        if self._is_repositionable is None:
            self._unused = self._make(0)
            self._is_repositionable = has_methods(self._unused, *POSITION)
        return self._is_repositionable

    def finish(self, state: Any) -> None:
        """Goes to the end of a pass, if the order of the next pass depends on it."""
        if self._keeps_order:
            self._own(self._make(0)).finish(state)

    def make_iterator(self, epoch: int) -> "OwnIterator":
        iterator = self._unused
        self._unused = None
        if iterator is None:
            iterator = self._make(epoch)
        return self._own(iterator)

    def _own(self, iterator: Any) -> "OwnIterator":
        return OwnIterator(iterator, self._copies, self._turn or Turn())


class Turn:
    """The right to move an object that has a single position.

    Several passes over such an object may be in progress, such as a training and a
    prediction on the same data. They use it in turn. A pass that loses its turn keeps
    its state, and sets it again before it continues.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        # A weak reference, because a pass that is not read any more needs no state.
        self.holder: weakref.ref[OwnIterator] | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> "Turn":
        return self  # A copy of a source calls the same function for its passes.


class OwnIterator:
    """One pass over a source, with batches and states that never change afterwards."""

    def __init__(self, iterator: Any, copies: bool, turn: Turn) -> None:
        self._iterator = iterator
        self._copies = copies
        self._turn = turn
        self._has_ended = False
        # The state, in a tuple, if the next batch comes after it. It is needed because
        # many iterators move only when their next batch is read.
        self._state: tuple[Any] | None = None

    def __next__(self) -> Batch:
        with self._turn.lock:
            if self._has_ended:
                raise StopIteration
            self._take_turn()
            try:
                batch = next(self._iterator)
            except StopIteration:
                self._has_ended = True
                raise
            self._state = None
            # Within the turn, because the next pass may overwrite the buffer.
            return jax.tree.map(_copy, batch) if self._copies else batch

    def get_state(self) -> Any:
        with self._turn.lock:
            if self._state is None:
                self._take_turn()
                return self._read_state()
            (state,) = self._state
            return copy.deepcopy(state)

    def set_state(self, state: Any) -> None:
        with self._turn.lock:
            self._take_turn((state,))

    def finish(self, state: Any) -> None:
        """Goes to the end of a pass, if the order of the next pass depends on it."""
        with self._turn.lock:
            self._take_turn()
            self._iterator.finish(state)

    def _read_state(self) -> Any:
        # A copy, because many iterators return the live object.
        return copy.deepcopy(self._iterator.get_state())

    def _take_turn(self, new_state: tuple[Any] | None = None) -> None:
        """Makes the object stand where this pass is, or at a new state."""
        turn = self._turn
        holder = None if turn.holder is None else turn.holder()
        is_away = holder is not self
        if holder is not None and is_away and not holder._has_ended:
            holder._state = holder._state or (holder._read_state(),)

        state = new_state
        if state is None and is_away:
            state = self._state
        if state is not None:
            turn.holder = None  # After an error, the position is unknown.
            self._iterator.set_state(copy.deepcopy(state[0]))
            self._state = copy.deepcopy(state)
            self._has_ended = False
        turn.holder = weakref.ref(self)


def _copy(leaf: Any) -> Any:
    array = as_numpy(leaf)
    return array.copy() if isinstance(array, np.ndarray) else array


class LoaderIterator:
    """One pass at a time over a loader that keeps its position itself."""

    def __init__(
        self,
        loader: Any,
        convert: Callable[[Any], Batch] = lambda batch: batch,
        begin: Callable[[], None] = lambda: None,
    ) -> None:
        self.loader = loader
        self._convert = convert
        self._begin = begin
        self._iterator: Iterator[Any] | None = None

    def __next__(self) -> Batch:
        return self._convert(next(self._open()))

    def get_state(self) -> Any:
        self._open()
        return self.loader.state_dict()

    def set_state(self, state: Any) -> None:
        self._begin()
        self.loader.load_state_dict(state)
        self._iterator = iter(self.loader)

    def finish(self, state: Any) -> None:
        """Goes to the end of a pass, or to an equal position before the next pass."""
        try:
            self.set_state(copy.deepcopy(state))
            is_next = next(self, None) is not None
        except Exception as error:
            logger.warning(
                "A loader starts from the beginning, because it refused its state: %r",
                error,
            )
        else:
            if is_next:
                self.set_state(copy.deepcopy(state))

    def _open(self) -> Iterator[Any]:
        if self._iterator is None:
            self._begin()
            self._iterator = iter(self.loader)
        return self._iterator


def has_methods(value: Any, *names: str) -> bool:
    return all(callable(getattr(value, name, None)) for name in names)


def gives_single_examples(value: Any) -> bool:
    """Returns whether a value gives single examples by index, and no batches."""
    has_numbers = has_methods(value, "__len__", "__getitem__")
    is_text = isinstance(value, str | bytes | bytearray)
    return has_numbers and not is_text and not isinstance(value, Iterable | type)


def is_kind(value: Any, library: str, path: str) -> bool:
    """Returns whether a value is of a class of a library, which may not be loaded."""
    found: Any = sys.modules.get(library)
    for name in path.split("."):
        found = getattr(found, name, None)
    return isinstance(found, type) and isinstance(value, found)


def from_iterator(iterator: Any) -> IterableSource:
    """Returns a source of a single pass, unless the iterator has positions."""
    if has_methods(iterator, *POSITION):
        return _from_positioned(iterator)
    has_begun = False

    def begin(epoch: int) -> Any:
        nonlocal has_begun
        if has_begun:
            raise DatasetStateError(
                f"The dataset is an iterator of type {type(iterator).__name__}, which "
                "gives its batches only once, but the program needs a second pass. "
                "Pass the function that makes it (`make_batches`, not "
                "`make_batches()`)."
            )
        has_begun = True
        return iterator

    return IterableSource(begin, "iterator", is_repositionable=False)


def _from_positioned(iterator: Any) -> IterableSource:
    """Returns a source whose passes begin where an iterator is now."""
    start = copy.deepcopy(iterator.get_state())
    is_at_start = True

    def begin() -> None:
        nonlocal is_at_start
        if not is_at_start:
            iterator.set_state(copy.deepcopy(start))
        is_at_start = False

    loader = _AsLoader(iterator)
    return IterableSource(
        lambda epoch: LoaderIterator(loader, begin=begin),
        "iterator",
        is_repositionable=True,
        is_shared=True,
    )


class _AsLoader:
    """An iterator with positions, under the names of a loader."""

    def __init__(self, iterator: Any) -> None:
        self._iterator = iterator
        self.state_dict = iterator.get_state
        self.load_state_dict = iterator.set_state

    def __iter__(self) -> Any:
        return self._iterator


def returns_position(get_state: _Method) -> _Method:
    """Marks the `get_state` of a class whose only state is a position in its data."""
    setattr(get_state, IS_POSITION, True)
    return get_state


def may_be_missing(get_state: _Method) -> _Method:
    """Marks the `get_state` of a class whose older checkpoints have no state."""
    setattr(get_state, MAY_BE_MISSING, True)
    return get_state
