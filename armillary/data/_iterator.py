"""One pass over a distributed dataset, batch by batch, for loops of the user's own."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from armillary._jaxpr import is_in_trace
from armillary.data._layout import Active
from armillary.data.feed._batch_reader import BatchReader
from armillary.data.feed._feed import Feed
from armillary.data.feed._position import Position
from armillary.errors import CapturedStateError
from armillary.typing import PyTree

if TYPE_CHECKING:
    from armillary.data._dataset import DistributedDataset

_IN_TRACE = (
    "A batch was taken from a distributed dataset while a function is traced. Python "
    "runs once there, so that every call of the program would use this same batch. "
    "Take the batch outside and pass it in (`for batch in dataset: step(batch)`), or "
    "let a `StandardTrainer` run the loop: the iterator that `train_step` gets has a "
    "new batch in every step."
)


@dataclass(frozen=True, eq=False)
class PlacedBatch:
    """One batch on the devices.

    Args:
        arrays: The batch, as a layout can wrap it.
        num_active: As in `HostBatch`.
        positions: The position after it, as a `Feed` wants it.
        is_last: As in `HostBatch`.
    """

    arrays: PyTree
    num_active: Active
    positions: list[tuple[Position, ...]]
    is_last: bool


class DistributedIterator:
    """One pass over a `DistributedDataset`, read ahead by a background thread.

    The thread ends with the pass, with `close`, and when nobody holds the iterator.

    Args:
        dataset: What to read.
    """

    def __init__(self, dataset: "DistributedDataset") -> None:
        self._layout = dataset.layout
        self._feed: Feed[PlacedBatch] = Feed([dataset], exact=False, begins_anew=True)
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
            raise CapturedStateError(_IN_TRACE)
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

    def get_next_as_optional(self) -> "OptionalBatch":
        """Returns the next batch, or that there is none, for a loop without `for`."""
        return OptionalBatch(next(self, None))

    def close(self) -> None:
        """Ends the pass and its thread; the dataset keeps the position reached."""
        self._feed.close()


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


def place_batches(readers: Sequence[BatchReader]) -> Iterator[PlacedBatch]:
    """Yields the batches of one reader on their devices."""
    (reader,) = readers
    for batch in reader:
        arrays = reader.gather.place(batch)
        yield PlacedBatch(arrays, batch.num_active, [(batch.position,)], batch.is_last)
