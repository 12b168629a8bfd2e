"""The one protocol of all sources; iterables, functions and iterators that keep it."""

import copy
from collections.abc import Callable, Iterator
from typing import Any, Protocol, TypeVar, runtime_checkable

import jax
import numpy as np

from armillary._logging import logger
from armillary.data.sources._batch import as_numpy
from armillary.errors import DatasetStateError
from armillary.typing import Batch

POSITION = ("get_state", "set_state")
"""The methods of iterators that can go back."""
MAY_BE_MISSING = "may_be_missing"
_Method = TypeVar("_Method", bound=Callable[..., Any])


class SourceIterator(Protocol):
    """One pass over a source. Used by one thread at a time."""

    def __next__(self) -> Batch:
        """Returns the next batch, which nobody writes to afterwards."""

    def get_state(self) -> Any:
        """Returns the position after the last batch, from what JSON can hold.

        Called only if the source is repositionable. The result must not change when
        the iterator moves on. Bytes are allowed too.
        """

    def set_state(self, state: Any) -> None:
        """Goes to a position that `get_state` returned, perhaps in another process."""


@runtime_checkable
class Source(Protocol):
    """Something that gives batches, any number of times."""

    name: str
    """The kind of source: for messages, and compared when a position is restored."""

    @property
    def is_repositionable(self) -> bool:
        """Whether its iterators have positions."""
        ...

    @property
    def full_size(self) -> int | None:
        """Examples in every batch but perhaps the last, or None if not known."""

    def make_iterator(self, epoch: int) -> SourceIterator:
        """Returns an iterator from the start of pass `epoch`, counted from 0."""
        ...


class IterableSource:
    """Makes an iterator for every pass; `copies` if batches may be one buffer.

    It `keeps_order` if loaders carry that from one pass to the next in their position.
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
    ) -> None:
        self.name = name
        # What is known of its data; the last is what a position depends on.
        self.is_endless = False
        self.num_batches: int | None = None
        self.order_of_examples: dict[str, Any] = {}
        self._make, self._copies, self._keeps_order = make, copies, keeps_order
        self._is_repositionable = is_repositionable
        self._unused: Any = None

    @property
    def is_repositionable(self) -> bool:
        if self._is_repositionable is None:
            self._unused = self._make(0)
            self._is_repositionable = has_methods(self._unused, *POSITION)
        return self._is_repositionable

    def finish(self, state: Any) -> None:
        """Goes to the end of a pass, if the order of the next one depends on it."""
        if self._keeps_order:
            self._make(0).finish(state)

    def make_iterator(self, epoch: int) -> "OwnIterator":
        iterator, self._unused = self._unused, None
        if iterator is None:
            iterator = self._make(epoch)
        return OwnIterator(iterator, self._copies)


class OwnIterator:
    """One pass: batches, and states, that nobody changes afterwards."""

    def __init__(self, iterator: Any, copies: bool) -> None:
        self._iterator, self._copies = iterator, copies

    def __next__(self) -> Batch:
        batch = next(self._iterator)
        return jax.tree.map(_copy, batch) if self._copies else batch

    def get_state(self) -> Any:
        # Many iterators return the live object.
        return copy.deepcopy(self._iterator.get_state())

    def set_state(self, state: Any) -> None:
        self._iterator.set_state(copy.deepcopy(state))


def _copy(leaf: Any) -> Any:
    array = as_numpy(leaf)
    return array.copy() if isinstance(array, np.ndarray) else array


class LoaderIterator:
    """One pass (at a time) over a loader that has its position itself."""

    def __init__(
        self,
        loader: Any,
        convert: Callable[[Any], Batch] = lambda batch: batch,
        begin: Callable[[], None] = lambda: None,
    ) -> None:
        self.loader, self._convert, self._begin = loader, convert, begin
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
        """Goes to the end of a pass, or to the next one's beginning if that is it."""
        try:
            self.set_state(copy.deepcopy(state))
            is_next = next(self, None) is not None
        except Exception as error:
            logger.warning(
                "A loader begins from its start, since it refuses its state: %r", error
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


def from_iterator(iterator: Any) -> IterableSource:
    """Returns a source of a single pass, unless the iterator can be taken back."""
    has_begun, can_go_back = False, has_methods(iterator, *POSITION)
    start = copy.deepcopy(iterator.get_state()) if can_go_back else None

    def begin(epoch: int) -> Any:
        nonlocal has_begun
        if has_begun and not can_go_back:
            raise DatasetStateError(
                f"The data set is an iterator of type {type(iterator).__name__}, which "
                "gives its batches once, but the program needs a second pass. Pass the "
                "function that makes it (`make_batches`, not `make_batches()`)."
            )
        if has_begun:
            iterator.set_state(copy.deepcopy(start))
        has_begun = True
        return iterator

    return IterableSource(begin, "iterator", is_repositionable=can_go_back)


def may_be_missing(get_state: _Method) -> _Method:
    """Marks the `get_state` of a class whose older checkpoints have no state."""
    setattr(get_state, MAY_BE_MISSING, True)
    return get_state
