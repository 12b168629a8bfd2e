"""Reads the pieces of one dataset, on from one position."""

from collections.abc import Iterator

from armillary.data.feed._gather import Gather
from armillary.data.feed._lockstep import MOST_OFFERS, Lockstep
from armillary.data.feed._position import BatchStream
from armillary.data.feed._prefetch import Prefetcher
from armillary.data.feed._split import HostBatch, Splitter


class BatchReader:
    """Yields host batches; made by `DistributedDataset.make_reader`.

    One thread at a time may read. An error of the data source is raised again by every
    later `next`, since what comes after it is not known. After an interrupt (Ctrl-C)
    the reader is of no use: a `Feed` makes another one.

    Args:
        stream: What to read.
        splitter: Splits it between replicas.
        gather: Makes of a batch what a step receives.
        lockstep: Keeps processes together, where each reads data of its own. Only the
            main thread may read then.
        reads_ahead: Whether a thread reads ahead what the processes are to agree on.

    Attributes:
        position: The position after the last batch that was taken.
        has_ended: Whether the end of the data was seen.
    """

    def __init__(
        self,
        stream: BatchStream,
        splitter: Splitter,
        gather: Gather,
        lockstep: Lockstep | None = None,
        *,
        reads_ahead: bool = False,
    ) -> None:
        self.stream, self.gather = stream, gather
        self.position = stream.position
        self.has_ended = False
        self._pieces: Iterator[HostBatch] = splitter.split(stream)
        self._ahead: Prefetcher[HostBatch] | None = None
        if lockstep is not None:
            num_ahead = MOST_OFFERS if reads_ahead else 0
            self._ahead = Prefetcher(self._pieces, num_ahead)
            self._pieces = lockstep.align(self._ahead, stream.position)
        self._peeked: HostBatch | None = None
        self._error: Exception | None = None

    def __iter__(self) -> "BatchReader":
        return self

    def __next__(self) -> HostBatch:
        batch = self.peek()
        if batch is None:
            raise StopIteration
        self._peeked = None
        self.position = batch.position
        return batch

    def peek(self) -> HostBatch | None:
        """Returns the next batch without taking it, or None at the end."""
        if self._error is not None:
            raise self._error
        if self._peeked is None and not self.has_ended:
            try:
                self._peeked = next(self._pieces, None)
            except Exception as error:
                self._error = error
                raise
            self.has_ended = self._peeked is None
        return self._peeked

    def close(self, timeout_seconds: float | None = None) -> None:
        """Ends the thread that reads ahead: a source serves one reader at a time."""
        if self._ahead is not None:
            self._ahead.close(timeout_seconds)
