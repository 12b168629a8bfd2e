"""One pass over a source: checked batches, each with the position after it."""

import copy
from typing import Any, NamedTuple

import jax

from armillary.data.feed._position import Position
from armillary.data.sources._batch import as_device_values, check_batch
from armillary.data.sources._source import Source
from armillary.errors import DatasetStateError
from armillary.typing import PyTree


class SourceBatch(NamedTuple):
    """One batch of the source, with NumPy leaves of equal leading size.

    They have the dtypes that they have on a device.
    """

    arrays: PyTree
    num_rows: int


class BatchStream:
    """Reads one pass of `source` from `position` on.

    Batches without rows are left out: they hold no example.

    Args:
        source: Where the batches come from.
        position: Where to begin. `position.is_exhausted` gives a stream at its end.

    Raises:
        DatasetStateError: If the source does not accept the position.
    """

    def __init__(self, source: Source, position: Position) -> None:
        self._source = source
        self._iterator: Any = None
        self._has_positions = source.is_repositionable
        self._peeked: list[tuple[SourceBatch, Position]] = []
        self._num_read = 0
        self.full_size = source.full_size or position.full_size
        self.element_spec: PyTree | None = None
        """Shapes and dtypes of the first batch, once it was read."""
        self.position = position
        """The position after the last batch that `next` returned."""
        if not position.is_exhausted:
            self._iterator = _open_iterator(source, position)

    def __iter__(self) -> "BatchStream":
        return self

    def __next__(self) -> SourceBatch:
        batch = self.peek()
        if batch is None:
            raise StopIteration
        self.position = self._peeked.pop(0)[1]
        return batch

    def peek(self) -> SourceBatch | None:
        """Returns the next batch without taking it, or None at the end."""
        while not self._peeked and self._iterator is not None:
            self._read()
        return self._peeked[0][0] if self._peeked else None

    def _read(self) -> None:
        """Reads one batch; if it has rows, it is the next one to hand out."""
        try:
            raw = next(self._iterator)
        except StopIteration:
            self._iterator = None
            return
        self._num_read += 1
        arrays, num_rows = check_batch(raw, self._name_batch)
        if not num_rows:
            return
        arrays = as_device_values(arrays, self._name_batch)
        if self.full_size is None:
            self.full_size = num_rows
        if self.element_spec is None:
            self.element_spec = jax.tree.map(
                lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), arrays
            )
        state = self._iterator.get_state() if self._has_positions else None
        position = Position(self.position.epoch, state, self.full_size)
        self._peeked.append((SourceBatch(arrays, num_rows), position))

    def _name_batch(self) -> str:
        return f"Batch {self._num_read - 1} of the source ({self._source.name})"


def _open_iterator(source: Source, position: Position) -> Any:
    iterator = source.make_iterator(position.epoch)
    if position.source is not None:
        try:
            # Iterators may keep the state and change it as they move on.
            iterator.set_state(copy.deepcopy(position.source))
        except DatasetStateError:
            raise
        except Exception as error:
            raise DatasetStateError(
                f"`state` does not fit the source ({source.name}).\n"
                f"  in the state:    {position.source!r:.300}\n"
                f"  the source says: {type(error).__name__}: {error}\n"
                "Build the data set as it was when the state was saved, or leave the "
                "dataset out of the checkpoint."
            ) from error
    return iterator
