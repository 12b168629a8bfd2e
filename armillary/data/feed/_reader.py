"""Reads one dataset from a position, in step with other processes."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from armillary.data.feed._ahead import Peekable, read_ahead
from armillary.data.feed._input import Input
from armillary.data.feed._lockstep import MAX_OFFERS, Lockstep
from armillary.data.feed._piece import Piece
from armillary.data.feed._position import Position
from armillary.data.feed._split import Splitter
from armillary.data.feed._stream import SourceBatch


class BatchReader:
    """Yields the pieces of a dataset's batches, to one thread at a time."""

    def __init__(
        self,
        data: Input,
        position: Position,
        batches: Peekable[SourceBatch],
        *,
        in_pieces: bool,
        reads_ahead: bool = True,
    ) -> None:
        is_exact = data.options.remainder == "exact"
        if data.is_agreed and is_exact and not in_pieces:
            raise ValueError(
                '`remainder` is "exact", but each process reads its own data, so rows '
                "would have to be sent between processes. Distribute one dataset over "
                "all processes (`strategy.distribute_dataset`), or use "
                '`remainder="pad"`.'
            )
        self.data = data
        self._in_pieces = in_pieces
        self._most_offers = MAX_OFFERS if reads_ahead else 1
        self._reads_ahead = reads_ahead
        self.used = position  # the position after the last batch that was used
        self.open(position, batches)

    def open(self, position: Position, batches: Peekable[SourceBatch]) -> None:
        data = self.data
        self.batches: Peekable[SourceBatch] | None = batches  # None once closed
        self.position = position  # the position after the last batch that was taken
        pieces = Splitter(data, in_pieces=self._in_pieces).split(batches, position)
        self._ahead: Peekable[Piece] | None = None
        if data.is_agreed:
            # A thread reads ahead the pieces that the processes must agree on.
            has_thread = self._reads_ahead and data.options.prefetch > 0
            num_ahead = self._most_offers if has_thread else 0
            ahead = self._ahead = read_ahead(pieces, num_ahead, self)
            lockstep = Lockstep(ahead, data, self._in_pieces, self._most_offers)
            pieces = lockstep.align(position)
        self._pieces = Peekable(pieces)

    def reopen(self, position: Position) -> None:
        """Drops batches that were read, and goes to another position."""
        self.close()
        self.open(position, self.data.read(position))

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
        yield replace(piece, arrays=reader.data.gather.place(piece))
