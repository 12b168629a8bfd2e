"""The iterator over one pass of a distributed dataset."""

from collections.abc import Callable
from dataclasses import dataclass

from armillary._jaxpr import is_in_trace
from armillary.data._layout import BatchLayout
from armillary.data.feed._feed import Feed
from armillary.data.feed._piece import Piece
from armillary.data.feed._reader import place_pieces
from armillary.errors import CapturedStateError
from armillary.typing import PyTree


@dataclass(frozen=True)
class OptionalBatch:
    """A batch, or the end of the data (`tf.experimental.Optional`).

    `DistributedIterator.get_next_as_optional` returns it.
    """

    _batches: tuple[PyTree, ...]  # one or none

    def has_value(self) -> bool:
        """Returns whether there is a batch; false at the end of the data."""
        return bool(self._batches)

    def get_value(self) -> PyTree:
        """Returns the batch.

        Raises:
            ValueError: If the data had ended.
        """
        if not self._batches:
            raise ValueError(
                "`get_value()` was called at the end of the data, where there is no "
                "batch. Check first: `if batch.has_value(): step(batch.get_value())`."
            )
        return self._batches[0]


class DistributedIterator:
    """One pass over a `DistributedDataset`, read ahead by a background thread.

    The thread ends with the pass, with `close`, or when the iterator is deleted.
    """

    def __init__(
        self, open_pass: Callable[[], Feed[Piece]], layout: BatchLayout, prefetch: int
    ) -> None:
        self._open_pass = open_pass
        self._layout = layout
        self._prefetch = prefetch
        self._open()

    def _open(self) -> None:
        self._is_fresh = True
        self._feed = self._open_pass()
        self._feed.start(place_pieces, self._prefetch)

    def initialize(self) -> None:
        """Begins the next pass over the data, unless this one has not begun yet.

        Programs written for TensorFlow 1 call it before each epoch. It is the same as
        `iterator = iter(dataset)`.
        """
        if not self._is_fresh:
            self.close()
            self._open()

    def __iter__(self) -> "DistributedIterator":
        return self

    def __next__(self) -> PyTree:
        """Returns the next batch as the layout wraps it.

        Raises:
            StopIteration: If the data has ended. Every later call raises it again.
            BatchSizeError: If the replicas cannot share the batch equally.
            DatasetStateError: If Ctrl-C interrupted reading, and the source cannot go
                back.
            CapturedStateError: If a function is being traced, because the batch would
                become a constant of its program.
        """
        if is_in_trace():
            raise CapturedStateError(
                "A batch was taken from a distributed dataset while a function is "
                "traced, so every call of the program would use this same batch. Take "
                "it outside and pass it in (`for batch in dataset: step(batch)`), or "
                "let a `StandardTrainer` run the loop."
            )
        self._is_fresh = False
        batch = self._feed.next_chunk()
        if batch is None:
            raise StopIteration
        value = self._layout.wrap(batch.arrays, batch.active)
        self._feed.read_on()
        # ORDER: last, so that after an interrupt the same batch is returned again.
        self._feed.commit(1)
        return value

    get_next = __next__  # as `tf.distribute` spells it

    def get_next_as_optional(self) -> OptionalBatch:
        """Returns the next batch, or the end of the data, without `StopIteration`.

        In Python, `for batch in iterator:` does the same::

            batch = iterator.get_next_as_optional()
            while batch.has_value():
                strategy.run(step_fn, args=(batch.get_value(),))
                batch = iterator.get_next_as_optional()
        """
        try:
            return OptionalBatch((next(self),))
        except StopIteration:
            return OptionalBatch(())

    def close(self) -> None:
        """Ends the pass and its thread; the dataset keeps the position."""
        self._feed.close()
