"""The batches of a source, with the position after each of them."""

import copy
import itertools
from collections.abc import Callable, Iterator
from typing import NamedTuple

from armillary.data.feed._ahead import Peekable
from armillary.data.feed._position import Position
from armillary.data.sources._batch import as_device_values, check_batch
from armillary.data.sources._source import IterableSource, Source
from armillary.data.sources._stale import explaining_deleted_arrays
from armillary.errors import DatasetStateError
from armillary.typing import PyTree


class SourceBatch(NamedTuple):
    """A batch of a source, and the position after it."""

    arrays: PyTree
    position: Position


def read_batches(
    source: Source, position: Position, note: Callable[[SourceBatch], None]
) -> Peekable[SourceBatch]:
    """Returns the batches of one pass from a position on, and calls `note` for each."""
    if position.is_exhausted:
        if position.source is not None and isinstance(source, IterableSource):
            source.finish(position.source)
        return Peekable(iter(()))
    iterator = source.make_iterator(position.epoch)
    if position.source is not None:
        try:
            # A copy, because iterators may keep the state and change it.
            iterator.set_state(copy.deepcopy(position.source))
        except DatasetStateError:
            raise
        except Exception as error:
            raise DatasetStateError(
                f"`state` does not fit the source ({source.name}).\n"
                f"  in the state:    {position.source!r:.300}\n"
                f"  the source says: {type(error).__name__}: {error}\n"
                "Build the dataset in the same way as when the state was saved, or "
                "leave the dataset out of the checkpoint."
            ) from error
    has_positions = source.is_repositionable
    has_row_numbers = getattr(source, "has_row_numbers", False)

    def read() -> Iterator[SourceBatch]:
        full_size = source.full_size or position.full_size
        for number in itertools.count():

            def get_name(number: int = number) -> str:
                return f"Batch {number} of the source ({source.name})"

            try:
                with explaining_deleted_arrays(get_name):
                    raw = next(iterator)
            except StopIteration:
                return
            arrays, num_rows = check_batch(raw, get_name)
            if num_rows:
                if not has_row_numbers:  # They stay on the host, or fit.
                    arrays = as_device_values(arrays, get_name)
                full_size = full_size or num_rows
                state = iterator.get_state() if has_positions else None
                batch = SourceBatch(arrays, Position(position.epoch, state, full_size))
                note(batch)
                yield batch

    return Peekable(read())
