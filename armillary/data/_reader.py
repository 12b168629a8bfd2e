"""The core of every iterator: reads pieces, and knows which of them were used.

Reading and using are apart, since batches are read ahead: `next` only reads, and
`commit` moves the position that the dataset reports.
"""

import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import jax

from armillary._typing import Batch
from armillary.data._agreed import MOST_OFFERS, Agreement
from armillary.data._batch import canonical_dtype
from armillary.data._layout import BatchLayout
from armillary.data._position import Position
from armillary.data._prefetch import Prefetcher
from armillary.data._rows import RowTaker
from armillary.data._split import HostBatch, Splitter
from armillary.data._stream import BatchStream

_CLOSE_TIMEOUT_SECONDS = 5.0


class Progress:
    """Holds the position after the last batch that was used."""

    def __init__(self, position: Position) -> None:
        self.position = position


class HostReader:
    """Yields host batches; made by `DistributedDataset.make_reader`.

    One thread at a time may read. Committing is meant for the thread that uses the
    batches, and may happen while another one reads::

        batch = next(reader)
        ...                             # use batch.arrays
        reader.commit(batch.position)   # the dataset's position is now after `batch`

    An exception of the data source is raised again by every later `next`, since what
    comes after it is not known. After an interrupt (Ctrl-C), which is no error of the
    source, the next call goes on behind the last batch taken.

    Where the data are arrays in memory, `batch.arrays` holds row numbers, which `rows`
    turns into what a step receives.

    Args:
        stream: What to read first.
        open_stream: Opens another one, at a position.
        splitter: Splits it between replicas.
        layout: Where the replicas are.
        rows: Knows which arrays stay on the device.
        agreement: What the processes agree on, where each reads data of its own. Only
            the main thread may read then.
        reads_ahead: Whether the pieces to agree on are read ahead.
    """

    def __init__(
        self,
        stream: BatchStream,
        open_stream: Callable[[Position], BatchStream],
        splitter: Splitter,
        layout: BatchLayout,
        rows: RowTaker,
        agreement: Agreement | None = None,
        reads_ahead: bool = False,
    ) -> None:
        self.layout = layout
        self.rows = rows
        self.progress = Progress(stream.position)
        self.is_closed = False
        self._open_stream = open_stream
        self._splitter = splitter
        self._agreement = agreement
        self._num_ahead = MOST_OFFERS if reads_ahead else 0
        self._stop_reading_ahead: Callable[[], Callable[[], None] | None] = _no_owner
        self._begin(stream)

    def _begin(self, stream: BatchStream) -> None:
        self.stream: BatchStream | None = stream
        self._token = stream.position.stream
        self._pieces: Iterator[HostBatch] = self._splitter.split(stream)
        self._ahead: Prefetcher[HostBatch] | None = None
        if self._agreement is not None:
            self._ahead = Prefetcher(self._pieces, self._num_ahead)
            self._pieces = self._agreement.agree(self._ahead, stream.position)
        self._was_interrupted = False
        self._peeked: HostBatch | None = None
        self._last_position = stream.position
        self._has_ended = False
        self._is_end_seen = False
        self._error: BaseException | None = None

    def __iter__(self) -> "HostReader":
        return self

    def __next__(self) -> HostBatch:
        batch = self.peek()
        if batch is None:
            raise StopIteration
        self._peeked = None
        self._last_position = batch.position
        return batch

    def peek(self) -> HostBatch | None:
        """Returns the next batch without taking it, or None at the end."""
        if self._error is not None:
            raise self._error
        if self._was_interrupted:
            self._resume()
        if self._peeked is None and not self._has_ended:
            try:
                self._peeked = next(self._pieces, None)
            except BaseException as error:
                if isinstance(error, Exception) or self._agreement is not None:
                    self._error = error  # Other processes know of it too.
                else:
                    self._was_interrupted = True
                raise
            self._has_ended = self._peeked is None
        return self._peeked

    def _resume(self) -> None:
        """Goes on behind the last batch taken: generators that were interrupted end."""
        stream = self.stream
        if stream is not None:
            if stream.is_repositionable:
                stream = self._open_stream(self._last_position)
                stream.position = self._last_position  # Batches taken stay current.
                self.stream = stream
            self._peeked, self._pieces = None, self._splitter.split(stream)
        self._was_interrupted = False

    def types(self, batch: HostBatch) -> Batch:
        """Returns the types of a host batch as a step receives it."""
        return self.rows.types(self._global_types(batch))

    def sent_types(self, batch: HostBatch) -> Batch:
        """Returns the types of a host batch as it travels to the device."""
        return self.rows.sent_types(self._global_types(batch))

    def place(self, batch: HostBatch) -> Batch:
        """Returns a host batch on the devices, as a step receives it."""
        return self.rows.place(batch.arrays, batch.num_replicas)

    def _global_types(self, batch: HostBatch) -> Batch:
        """Returns the types of a host batch with the rows of all processes."""
        if self.layout.peers is None:
            return _types(batch.arrays)
        return jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(
                (batch.num_replicas, *leaf.shape[1:]), canonical_dtype(leaf)
            ),
            batch.arrays,
        )

    def commit(self, position: Position) -> None:
        """Marks everything up to the batch with `position` as used.

        Positions that were read before the dataset's `set_state` have no effect.
        """
        if self.is_current(position):
            self.progress.position = position
            self._finish_if_used()

    def commit_end(self) -> None:
        """Tells that the program saw the end of the data.

        The pass counts as finished once the last batch is committed too.
        """
        self._is_end_seen = self._has_ended
        self._finish_if_used()

    def _finish_if_used(self) -> None:
        position = self.progress.position
        # With batches read ahead, the last one read may not have been used yet.
        if self._is_end_seen and position is self._last_position:
            self.progress.position = replace(position, is_exhausted=True)
            self._last_position = self.progress.position

    def attach(self, stop_reading_ahead: Callable[[], None]) -> None:
        """Names the bound method that ends and forgets reading ahead from this reader.

        It is called before the reader is moved, and is held weakly.
        """
        self._stop_reading_ahead = weakref.WeakMethod(stop_reading_ahead)

    def is_current(self, position: Position) -> bool:
        """Returns whether `position` was read since the reader was last moved."""
        return position.stream is self._token

    def move(self, position: Position) -> None:
        """Goes to another position; what was read ahead is dropped.

        If the source refuses the position, the reader goes back to where it was.
        """
        stop = self._stop_reading_ahead()
        if stop is not None:
            stop()
        self._stop_ahead()
        try:
            stream = self._open_stream(position)
        except BaseException:
            self._begin(self._open_stream(self.progress.position))
            raise
        self._begin(stream)
        self.progress.position = stream.position

    def rewind(self) -> None:
        """Goes back to the position committed last, so as to read what follows again.

        A source that cannot be repositioned goes on from where it was read to.
        """
        if self.stream is not None and self.stream.is_repositionable:
            self._stop_ahead()
            self._begin(self._open_stream(self.progress.position))
            self.progress.position = self._last_position

    def close(self) -> None:
        """Lets go of the data source; the position reached stays."""
        self.is_closed = True
        self._stop_ahead(_CLOSE_TIMEOUT_SECONDS)
        self._has_ended = True
        self._peeked = None
        self._pieces = iter(())
        self.stream = None

    def _stop_ahead(self, timeout_seconds: float | None = None) -> None:
        """Ends the thread that reads ahead: a source serves one reader at a time."""
        if self._ahead is not None:
            self._ahead.close(timeout_seconds)


def _no_owner() -> Any:
    return None


def _types(batch: Batch) -> Batch:
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, canonical_dtype(leaf)), batch
    )
