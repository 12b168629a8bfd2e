"""Reads one dataset from a position, in step with other processes."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from armillary.data.feed._lockstep import MOST_OFFERS, Lockstep
from armillary.data.feed._position import Position
from armillary.data.feed._prefetcher import Prefetcher
from armillary.data.feed._split import Piece, Splitter
from armillary.data.feed._stream import SourceBatch

if TYPE_CHECKING:
    from armillary.data._dataset import DistributedDataset
    from armillary.data.feed._feed import Feed


class BatchReader:
    """Yields the pieces of a dataset's batches, to one thread at a time."""

    def __init__(
        self,
        dataset: "DistributedDataset",
        position: Position,
        batches: Prefetcher[SourceBatch],
        *,
        in_pieces: bool,
        reads_ahead: bool = True,
    ) -> None:
        if dataset.is_agreed and dataset.options.remainder == "exact" and not in_pieces:
            raise ValueError(
                '`remainder` is "exact", but each process reads its own data, so rows '
                "would have to be sent between processes. Distribute one data set over "
                "all processes (`strategy.distribute_dataset`), or use "
                '`remainder="pad"`.'
            )
        self.dataset = dataset
        self.gather = dataset.gather
        self._in_pieces = in_pieces
        self._most_offers = MOST_OFFERS if reads_ahead else 1
        self._reads_ahead = reads_ahead
        self.feed: Callable[[], Feed[Any] | None] = lambda: None  # its owner
        self.used = position  # the position after the last batch that was used
        self.open(position, batches)

    def open(self, position: Position, batches: Prefetcher[SourceBatch]) -> None:
        """Begins to read `batches`, which follow `position`."""
        dataset = self.dataset
        self.batches: Prefetcher[SourceBatch] | None = batches  # None once closed
        self.position = position  # the position after the last batch that was taken
        splitter = Splitter(dataset, in_pieces=self._in_pieces)
        pieces = splitter.split(batches, position)

        self._ahead: Prefetcher[Piece] | None = None
        if dataset.is_agreed:
            # A thread reads ahead the pieces that the processes must agree on.
            has_thread = self._reads_ahead and dataset.options.prefetch > 0
            num_ahead = self._most_offers if has_thread else 0
            ahead = Prefetcher(pieces, num_ahead, self)
            self._ahead = ahead
            lockstep = Lockstep(
                ahead, dataset.layout, self._in_pieces, self._most_offers
            )
            pieces = lockstep.align(position)
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
        return self._pieces.has_ended

    def close(self, timeout_seconds: float | None = None) -> None:
        """Ends the reading thread, because a source serves one reader at a time."""
        if self._ahead is not None:
            self._ahead.close(timeout_seconds)
        self._pieces.close()
        self.batches = None


def place_pieces(readers: Sequence[BatchReader]) -> Iterator[Piece]:
    (reader,) = readers
    for piece in reader:
        yield replace(piece, arrays=reader.gather.place(piece))
