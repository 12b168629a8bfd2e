"""One pass over a distributed dataset, batch by batch, for loops of the user's own."""

import weakref
from collections.abc import Iterator

from armillary._typing import PyTree
from armillary.data._prefetch import Prefetcher
from armillary.data._reader import HostReader
from armillary.data._split import HostBatch

_CLOSE_TIMEOUT_SECONDS = 5.0


class DistributedIterator:
    """One pass over a `DistributedDataset`, read ahead by a background thread.

    The thread ends with the pass, with `close`, and when nobody holds the iterator.
    """

    def __init__(self, reader: HostReader, prefetch: int) -> None:
        self._reader = reader
        self._prefetch = prefetch
        self._prefetcher: Prefetcher[tuple[PyTree, HostBatch]] | None = None
        self._is_closed = False
        reader.attach(self._stop_reading_ahead)
        weakref.finalize(self, reader.close)

    def __iter__(self) -> "DistributedIterator":
        return self

    def __next__(self) -> PyTree:
        """Returns the next batch as the layout wraps it.

        Raises:
            StopIteration: If the data has ended, again at every call.
            BatchSizeError: If the replicas cannot share the batch equally.
        """
        if self._is_closed:
            raise StopIteration
        if self._prefetcher is not None and self._prefetcher.was_interrupted:
            self._stop_reading_ahead()
            self._reader.rewind()
        if self._prefetcher is None:
            self._prefetcher = Prefetcher(_place(self._reader), self._prefetch)
        try:
            arrays, batch = next(self._prefetcher)
        except StopIteration:
            self._reader.commit_end()
            raise
        self._reader.commit(batch.position)
        return self._reader.layout.wrap(arrays, batch.num_active)

    def get_next(self) -> PyTree:
        """Returns the next batch: `next(iterator)` as `tf.distribute` spells it.

        Raises:
            StopIteration: If the data has ended.
        """
        return next(self)

    def get_next_as_optional(self) -> "OptionalBatch":
        """Returns the next batch, or that there is none, for a loop without `for`."""
        return OptionalBatch(next(self, None))

    def close(self) -> None:
        """Ends the pass and its thread; the dataset keeps the position reached."""
        self._is_closed = True
        if self._prefetcher is not None:
            self._prefetcher.close(_CLOSE_TIMEOUT_SECONDS)
        self._reader.close()

    def _stop_reading_ahead(self) -> None:
        if self._prefetcher is not None:
            self._prefetcher.close()
            self._prefetcher = None


class OptionalBatch:
    """The next batch, if there is one (`tf.experimental.Optional`).

    Use it in a loop without `for`::

        optional = iterator.get_next_as_optional()
        while optional.has_value():
            strategy.run(step_fn, args=(optional.get_value(),))
            optional = iterator.get_next_as_optional()

    Args:
        batch: The batch; `None` if the data has ended.
    """

    def __init__(self, batch: PyTree) -> None:
        self._batch = batch

    def has_value(self) -> bool:
        """Returns whether there is a batch."""
        return self._batch is not None

    def get_value(self) -> PyTree:
        """Returns the batch.

        Raises:
            ValueError: If the data has ended.
        """
        if self._batch is None:
            raise ValueError(
                "`get_value` was called, but the data has ended and there is no batch. "
                "Ask `has_value()` first."
            )
        return self._batch


def _place(reader: HostReader) -> Iterator[tuple[PyTree, HostBatch]]:
    while (batch := reader.peek()) is not None:
        placed = reader.place(batch)
        yield placed, next(reader)
