"""Loaders that have their position themselves: `state_dict` and `load_state_dict`.

`IterableDataset` of Hugging Face and `StatefulDataLoader` of PyTorch do, while what
`iter` makes of them has no state. So only one pass over a loader goes on at a time.
"""

import copy
from collections.abc import Callable, Iterable, Iterator
from typing import Any

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
