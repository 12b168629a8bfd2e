"""One pass over a distributed dataset, batch by batch, for loops of the user's own."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from armillary._jaxpr import is_in_trace
from armillary.data.feed._feed import Feed
from armillary.data.feed._reader import BatchReader
from armillary.data.feed._split import Piece
from armillary.errors import CapturedStateError
from armillary.typing import PyTree

if TYPE_CHECKING:
    from armillary.data._dataset import DistributedDataset


class DistributedIterator:
    """One pass over a `DistributedDataset`, read ahead by a background thread.

    The thread ends with the pass, with `close`, and when nobody holds the iterator.

    Args:
        dataset: What to read.
    """

    def __init__(self, dataset: "DistributedDataset") -> None:
        self._layout = dataset.layout
        self._feed: Feed[Piece] = Feed([dataset], exact=False, begins_anew=True)
        self._feed.start(place_batches, dataset.prefetch)

    def __iter__(self) -> "DistributedIterator":
        return self

    def __next__(self) -> PyTree:
        """Returns the next batch as the layout wraps it.

        Raises:
            StopIteration: If the data has ended, again at every call.
            BatchSizeError: If the replicas cannot share the batch equally.
            DatasetStateError: If Ctrl-C came while data was read that cannot go back.
            CapturedStateError: If a function is being traced, which would make the
                batch a constant of its program.
        """
        if is_in_trace():
            raise CapturedStateError(
                "A batch was taken from a distributed dataset while a function is "
                "traced, so that every call of the program would use this same batch. "
                "Take it outside and pass it in (`for batch in dataset: step(batch)`), "
                "or let a `StandardTrainer` run the loop."
            )
        batch = self._feed.next_chunk()
        if batch is None:
            raise StopIteration
        value = self._layout.wrap(batch.arrays, batch.num_active)
        self._feed.read_on()
        # ORDER: last, since an interrupt before it gives the batch out again.
        self._feed.commit(1)
        return value

    def get_next(self) -> PyTree:
        """Returns the next batch: `next(iterator)` as `tf.distribute` spells it.

        Raises:
            StopIteration: If the data has ended.
        """
        return next(self)

    def close(self) -> None:
        """Ends the pass and its thread; the dataset keeps the position reached."""
        self._feed.close()


def place_batches(readers: Sequence[BatchReader]) -> Iterator[Piece]:
    """Yields the batches of one reader on their devices."""
    (reader,) = readers
    for piece in reader:
        yield replace(piece, arrays=reader.gather.place(piece))
