"""Reads one dataset on from a position: whole batches, then pieces for the replicas."""

import copy
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import jax

from armillary.data.feed._lockstep import MOST_OFFERS, Lockstep
from armillary.data.feed._position import Position
from armillary.data.feed._prefetch import Prefetcher
from armillary.data.feed._split import Piece, Splitter
from armillary.data.sources._batch import as_device_values, check_batch
from armillary.data.sources._source import Source
from armillary.errors import DatasetStateError
from armillary.typing import PyTree

if TYPE_CHECKING:
    from armillary.data._dataset import DistributedDataset
    from armillary.data.feed._feed import Feed


class BatchStream:
    """Reads one pass of a source: NumPy leaves of one leading size, in device dtypes.

    Batches without rows are left out: they hold no example.

    Attributes:
        position: The position after the last batch that `next` returned.
        full_size: Examples in a batch that was not cut short, once that is known.
        element_spec: Shapes and dtypes of the first batch, once it was read.
    """

    def __init__(self, source: Source, position: Position) -> None:
        self._source = source
        self._has_positions = source.is_repositionable
        self._peeked: tuple[PyTree, Position] | None = None
        self._num_read = 0
        self.position = position
        self.full_size = source.full_size or position.full_size
        self.element_spec: PyTree | None = None
        self._iterator: Any = None
        if not position.is_exhausted:
            self._iterator = _open_iterator(source, position)

    def __iter__(self) -> "BatchStream":
        return self

    def __next__(self) -> PyTree:
        if self.peek() is None or self._peeked is None:
            raise StopIteration
        (arrays, self.position), self._peeked = self._peeked, None
        return arrays

    def peek(self) -> PyTree | None:
        """Returns the next batch without taking it, or None at the end."""
        while self._peeked is None and self._iterator is not None:
            try:
                raw = next(self._iterator)
            except StopIteration:
                self._iterator = None
                return None
            self._num_read += 1
            arrays, num_rows = check_batch(raw, self._name_batch)
            if num_rows:
                arrays = as_device_values(arrays, self._name_batch)
                self._peeked = arrays, self._find_position(arrays, num_rows)
        return None if self._peeked is None else self._peeked[0]

    def _find_position(self, arrays: PyTree, num_rows: int) -> Position:
        self.full_size = self.full_size or num_rows
        if self.element_spec is None:
            self.element_spec = jax.tree.map(
                lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), arrays
            )
        state = self._iterator.get_state() if self._has_positions else None
        return Position(self.position.epoch, state, self.full_size)

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


class BatchReader:
    """Yields the pieces of a dataset's stream; one thread at a time may read.

    An error of the source is raised again by every later `next`, since what comes after
    it is not known. After an interrupt (Ctrl-C) it must be opened again.

    Attributes:
        dataset: What it reads.
        feed: The feed that it belongs to.
        used: The position after the last batch that the program has used.
        position: The position after the last batch that was taken.
        stream: What it reads from; None once it was closed.
    """

    def __init__(
        self, dataset: "DistributedDataset", stream: BatchStream, *, exact: bool
    ) -> None:
        if dataset.is_agreed and dataset.options.remainder == "exact" and not exact:
            raise ValueError(
                '`remainder` is "exact", but each process reads data of its own, and '
                "rows that replicas share anew would have to travel between processes. "
                "Distribute one data set over all of them "
                "(`strategy.distribute_dataset`), or use "
                '`InputOptions(remainder="drop")` or `InputOptions(remainder="pad")`.'
            )
        self.dataset, self.gather = dataset, dataset.gather
        self._exact = exact
        self.feed: weakref.ref[Feed[Any]] | None = None
        self.used = stream.position
        self.open(stream)

    def open(self, stream: BatchStream) -> None:
        """Reads from this stream from now on."""
        dataset = self.dataset
        self.stream: BatchStream | None = stream
        self.position = stream.position
        pieces = Splitter(dataset, exact=self._exact).split(stream)
        self._ahead: Prefetcher[Piece] | None = None
        if dataset.is_agreed:
            # A thread reads ahead what the processes are to agree on.
            num_ahead = MOST_OFFERS if dataset.options.prefetch else 0
            ahead = self._ahead = Prefetcher(pieces, num_ahead, self)
            pieces = Lockstep(ahead, dataset.layout, self._exact).align(self.position)
        self._pieces = Prefetcher(pieces, 0, self)

    def __iter__(self) -> "BatchReader":
        return self

    def __next__(self) -> Piece:
        batch = next(self._pieces)
        self.position = batch.position
        return batch

    def peek(self) -> Piece | None:
        """Returns the next batch without taking it, or None at the end."""
        try:
            return self._pieces.head()
        except StopIteration:
            return None

    @property
    def has_ended(self) -> bool:
        """Whether the end of the data was seen."""
        return self._pieces.has_ended

    def move(self, position: Position) -> bool:
        """Goes to another position, unless nobody reads any more; returns which."""
        feed = None if self.feed is None else self.feed()
        if feed is None or feed.is_closed:
            return False
        feed.seek([position if it is self else it.used for it in feed.readers])
        return True

    def close(self, timeout_seconds: float | None = None) -> None:
        """Ends the thread that reads ahead: a source serves one reader at a time."""
        if self._ahead is not None:
            self._ahead.close(timeout_seconds)
        self._pieces.close()
        self.stream = None


def place_pieces(readers: Sequence[BatchReader]) -> Iterator[Piece]:
    """Yields the pieces of one reader on their devices."""
    (reader,) = readers
    for piece in reader:
        yield replace(piece, arrays=reader.gather.place(piece))
