"""Iterables, generator functions and single iterators as sources.

They can be repositioned if their iterators have `get_state` and `set_state`.

Loaders that have their position themselves: `state_dict` and `load_state_dict`.

`IterableDataset` of Hugging Face and `StatefulDataLoader` of PyTorch do, while what
`iter` makes of them has no state. So only one pass over a loader goes on at a time.
"""

import copy
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import numpy as np

from armillary.data.sources._batch import as_array
from armillary.errors import DatasetStateError
from armillary.typing import Batch


class StatefulSource:
    """Makes passes over a loader that can be repositioned.

    Args:
        loader: Has `state_dict` and `load_state_dict`, and can be iterated over.
        name: The kind of source, as messages and saved positions call it.
        convert: Makes what a source gives of what the loader gives.
        begin: Takes the loader to the start of a pass, given its number.
        pack: Makes of a state what a position can hold.
        unpack: Makes a state of that.
        is_repositionable: Whether the state is all of the position.
    """

    full_size = None

    def __init__(
        self,
        loader: Any,
        name: str,
        convert: Callable[[Any], Batch],
        *,
        begin: Callable[[int], None] = lambda epoch: None,
        pack: Callable[[Any], Any] = copy.deepcopy,
        unpack: Callable[[Any], Any] = copy.deepcopy,
        is_repositionable: bool = True,
    ) -> None:
        self.is_repositionable = is_repositionable
        self.loader, self.name, self.convert = loader, name, convert
        self.begin, self.pack, self.unpack = begin, pack, unpack

    def make_iterator(self, epoch: int) -> "StatefulIterator":
        """Returns an iterator over a new pass."""
        return StatefulIterator(self, epoch)


class StatefulIterator:
    """One pass over a loader, which begins when it is first asked for something."""

    def __init__(self, source: StatefulSource, epoch: int) -> None:
        self._source, self._epoch = source, epoch
        self._iterator: Iterator[Any] | None = None

    def __next__(self) -> Batch:
        return self._source.convert(next(self._open()))

    def get_state(self) -> Any:
        """Returns a copy of the loader's state."""
        self._open()
        return self._source.pack(self._source.loader.state_dict())

    def set_state(self, state: Any) -> None:
        """Goes to a position, in the pass that it belongs to."""
        self._source.begin(self._epoch)
        self._source.loader.load_state_dict(self._source.unpack(state))
        self._iterator = iter(self._source.loader)

    def _open(self) -> Iterator[Any]:
        if self._iterator is None:
            self._source.begin(self._epoch)
            self._iterator = iter(self._source.loader)
        return self._iterator


def has_state_dict(loader: Any) -> bool:
    """Returns whether a loader has a position itself."""
    return isinstance(loader, Iterable) and all(
        callable(getattr(loader, name, None))
        for name in ("state_dict", "load_state_dict")
    )


class IterableSource:
    """Makes a new iterator for every pass.

    Args:
        make: Function that returns a new iterator.
        name: The kind of source, as messages and saved positions call it.
        copies: Whether to copy batches, which may be one buffer that is filled again.
    """

    full_size = None
    is_endless = False
    """Whether it is known that a pass never ends."""
    num_batches: int | None = None
    """Batches in one pass, if that is known."""

    def __init__(
        self, make: Callable[[], Iterator[Batch]], name: str, *, copies: bool = True
    ) -> None:
        self.name = name
        self._make, self._copies = make, copies
        self.order_of_examples: dict[str, Any] = {}
        """What a position depends on, where that is known; must not change."""
        self._unused: Iterator[Batch] | None = None
        self._is_repositionable: bool | None = None

    @property
    def is_repositionable(self) -> bool:
        """Whether the iterators have a state; makes one to find out."""
        if self._is_repositionable is None:
            self._unused = self._make_iterator()
        return bool(self._is_repositionable)

    def make_iterator(self, epoch: int) -> "OwnIterator":
        """Returns an iterator over a new pass, whatever the epoch is."""
        iterator, self._unused = self._unused, None
        if iterator is None:
            iterator = self._make_iterator()
        return OwnIterator(iterator, self._copies)

    def _make_iterator(self) -> Iterator[Batch]:
        iterator = self._make()
        self._is_repositionable = has_position(iterator)
        return iterator


class IteratorSource:
    """Gives one iterator: for a single pass, unless it can be repositioned."""

    name = "iterator"
    full_size = None

    def __init__(self, iterator: Iterator[Batch]) -> None:
        self._iterator = iterator
        self._is_used = False
        self.is_repositionable = has_position(iterator)
        # An iterator with a position can be taken back to where it was given to us.
        can_go_back = self.is_repositionable
        self._start = OwnIterator(iterator).get_state() if can_go_back else None

    def make_iterator(self, epoch: int) -> "OwnIterator":
        """Returns the iterator, at its start."""
        if self._is_used and not self.is_repositionable:
            raise DatasetStateError(
                f"The data set is an iterator of type {type(self._iterator).__name__}, "
                "which gives its batches once, and a second pass was asked for. Pass "
                "the function that makes it (`make_batches`, not `make_batches()`), "
                "or an object that can be iterated over again."
            )
        iterator = OwnIterator(self._iterator)
        if self._is_used:
            iterator.set_state(copy.deepcopy(self._start))
        self._is_used = True
        return iterator


class OwnIterator:
    """One pass: batches, and states, that nobody changes afterwards."""

    def __init__(self, iterator: Iterator[Batch], copies: bool = True) -> None:
        self._iterator: Any = iterator
        self._copies = copies

    def __next__(self) -> Batch:
        batch = next(self._iterator)
        return copy_batch(batch) if self._copies else batch

    def get_state(self) -> Any:
        """Returns a copy of the state, since many iterators return the live object."""
        return copy.deepcopy(self._iterator.get_state())

    def set_state(self, state: Any) -> None:
        """Goes to a position."""
        self._iterator.set_state(state)


def copy_batch(batch: Batch) -> Batch:
    """Returns a batch whose arrays nobody else has."""
    return jax.tree.map(_copy, batch)


def _copy(leaf: Any) -> Any:
    array = as_array(leaf)
    return array.copy() if isinstance(array, np.ndarray) else array


def has_position(iterator: Any) -> bool:
    """Returns whether `iterator` has `get_state` and `set_state`."""
    return callable(getattr(iterator, "get_state", None)) and callable(
        getattr(iterator, "set_state", None)
    )


def from_function(function: Callable[[], Any]) -> IterableSource:
    """Returns a source that calls `function` for every pass."""

    def make() -> Iterator[Batch]:
        made = function()
        if not isinstance(made, Iterable):
            raise TypeError(
                f"The data set is the function {function!r}, which returned "
                f"{made!r:.80} of type {type(made).__name__}, but it must return an "
                "iterator over batches. Write it with `yield`."
            )
        return iter(made)

    return IterableSource(make, "generator function")
