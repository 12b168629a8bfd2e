"""Iterables, functions, single iterators and loaders with a position as sources."""

import copy
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import numpy as np

from armillary.data.sources._batch import as_numpy
from armillary.errors import DatasetStateError
from armillary.typing import Batch


class IterableSource:
    """Makes a new iterator for every pass, given its number.

    Args:
        make: Returns it.
        name: The kind of source, as messages and saved positions call it.
        copies: Whether to copy batches, which may be one buffer that is filled again.
        is_repositionable: Whether the iterators have positions; `None` finds out.
    """

    full_size = None

    def __init__(
        self,
        make: Callable[[int], Any],
        name: str,
        *,
        copies: bool = True,
        is_repositionable: bool | None = None,
    ) -> None:
        self.name = name
        # What is known of its data; the last is what a position depends on.
        self.is_endless = False
        self.num_batches: int | None = None
        self.order_of_examples: dict[str, Any] = {}
        self._make, self._copies = make, copies
        self._is_repositionable = is_repositionable
        self._unused: Any = None

    @property
    def is_repositionable(self) -> bool:
        """Whether the iterators have a state; makes one to find out."""
        if self._is_repositionable is None:
            self._unused = self._make(0)
            self._is_repositionable = has_position(self._unused)
        return self._is_repositionable

    def make_iterator(self, epoch: int) -> "OwnIterator":
        """Returns an iterator over a new pass."""
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
        """Returns a copy of the state, since many iterators return the live object."""
        return copy.deepcopy(self._iterator.get_state())

    def set_state(self, state: Any) -> None:
        """Goes to a position."""
        self._iterator.set_state(copy.deepcopy(state))


class LoaderIterator:
    """One pass over a loader that has its position itself, as `state_dict`.

    What `iter` makes of such a loader has no state. So only one pass over it goes on at
    a time; it begins, with `begin`, when it is first asked for something.
    """

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
        """Returns the loader's state."""
        self._open()
        return self.loader.state_dict()

    def set_state(self, state: Any) -> None:
        """Goes to a position, in the pass that it belongs to."""
        self._begin()
        self.loader.load_state_dict(state)
        self._iterator = iter(self.loader)

    def _open(self) -> Iterator[Any]:
        if self._iterator is None:
            self._begin()
            self._iterator = iter(self.loader)
        return self._iterator


def has_state_dict(loader: Any) -> bool:
    """Returns whether a loader has a position itself."""
    names = ("state_dict", "load_state_dict")
    return isinstance(loader, Iterable) and all(
        callable(getattr(loader, name, None)) for name in names
    )


def has_position(iterator: Any) -> bool:
    """Returns whether `iterator` has `get_state` and `set_state`."""
    names = ("get_state", "set_state")
    return all(callable(getattr(iterator, name, None)) for name in names)


def from_iterator(iterator: Any) -> IterableSource:
    """Returns a source of a single pass, unless the iterator can be taken back."""
    has_begun, can_go_back = False, has_position(iterator)
    start = copy.deepcopy(iterator.get_state()) if can_go_back else None

    def begin(epoch: int) -> Any:
        nonlocal has_begun
        if has_begun and not can_go_back:
            raise DatasetStateError(
                f"The data set is an iterator of type {type(iterator).__name__}, which "
                "gives its batches once, and a second pass was asked for. Pass the "
                "function that makes it (`make_batches`, not `make_batches()`)."
            )
        if has_begun:
            iterator.set_state(copy.deepcopy(start))
        has_begun = True
        return iterator

    return IterableSource(begin, "iterator", is_repositionable=can_go_back)


def from_function(function: Callable[[], Any]) -> IterableSource:
    """Returns a source that calls `function` for every pass."""

    def make(epoch: int) -> Iterator[Any]:
        made = function()
        if not isinstance(made, Iterable):
            raise TypeError(
                f"The data set is the function {function!r}, which returned "
                f"{made!r:.80} of type {type(made).__name__}, but it must return an "
                "iterator over batches. Write it with `yield`."
            )
        return iter(made)

    return IterableSource(make, "generator function")


def _copy(leaf: Any) -> Any:
    array = as_numpy(leaf)
    return array.copy() if isinstance(array, np.ndarray) else array
