"""Reads one dataset on from a position: whole batches, then pieces for the replicas."""

import copy
import functools
import itertools
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from armillary.data.feed._lockstep import MOST_OFFERS, Lockstep
from armillary.data.feed._position import Position
from armillary.data.feed._prefetch import Prefetcher
from armillary.data.feed._split import Piece, Splitter
from armillary.data.sources._batch import as_device_values, check_batch
from armillary.data.sources._source import Source, SourceIterator
from armillary.errors import DatasetStateError
from armillary.typing import PyTree

if TYPE_CHECKING:
    from armillary.data._dataset import DistributedDataset
    from armillary.data.feed._feed import Feed


class SourceBatch(NamedTuple):
    """A batch of a source, and the position after it."""

    arrays: PyTree
    position: Position


def read_batches(
    source: Source, position: Position, note: Callable[[SourceBatch], None]
) -> Prefetcher[SourceBatch]:
    """Returns the batches of one pass, on from a position, to look at or to take.

    They are NumPy arrays of one leading size, in device dtypes. Those without rows are
    left out. `note` is told of each that is read.
    """
    if position.is_exhausted:
        return Prefetcher(iter(()), 0)
    iterator, has_positions = _open_iterator(source, position), source.is_repositionable

    def read() -> Iterator[SourceBatch]:
        full_size = source.full_size or position.full_size
        for number in itertools.count():
            try:
                raw = next(iterator)
            except StopIteration:
                return
            get_name = functools.partial(_name_batch, source, number)
            arrays, num_rows = check_batch(raw, get_name)
            if num_rows:
                arrays = as_device_values(arrays, get_name)
                full_size = full_size or num_rows
                state = iterator.get_state() if has_positions else None
                batch = SourceBatch(arrays, Position(position.epoch, state, full_size))
                note(batch)
                yield batch

    return Prefetcher(read(), 0)


def _name_batch(source: Source, number: int) -> str:
    return f"Batch {number} of the source ({source.name})"


def _open_iterator(source: Source, position: Position) -> SourceIterator:
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
    """Yields the pieces of a dataset's batches; one thread at a time may read.

    An error of the source is raised again by every later `next`, since what comes after
    it is not known. After an interrupt (Ctrl-C) it must be opened again.

    Attributes:
        dataset: What it reads.
        feed: The feed that it belongs to.
        used: The position after the last batch that the program has used.
        position: The position after the last batch that was taken.
        batches: What it reads from; None once it was closed.
    """

    def __init__(
        self,
        dataset: "DistributedDataset",
        position: Position,
        batches: Prefetcher[SourceBatch],
        *,
        exact: bool,
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
        self.used = position
        self.open(position, batches)

    def open(self, position: Position, batches: Prefetcher[SourceBatch]) -> None:
        """Reads these batches, from this position on."""
        dataset = self.dataset
        self.batches: Prefetcher[SourceBatch] | None = batches
        self.position = position
        pieces = Splitter(dataset, exact=self._exact).split(batches, position)
        self._ahead: Prefetcher[Piece] | None = None
        if dataset.is_agreed:
            # A thread reads ahead what the processes are to agree on.
            num_ahead = MOST_OFFERS if dataset.options.prefetch else 0
            ahead = self._ahead = Prefetcher(pieces, num_ahead, self)
            pieces = Lockstep(ahead, dataset.layout, self._exact).align(position)
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
        self.batches = None


def place_pieces(readers: Sequence[BatchReader]) -> Iterator[Piece]:
    """Yields the pieces of one reader on their devices."""
    (reader,) = readers
    for piece in reader:
        yield replace(piece, arrays=reader.gather.place(piece))
