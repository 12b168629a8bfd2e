"""Checks, before the first step, that a step can run on the last batch of a pass."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import jax
import numpy as np

from armillary.data.feed._piece import Piece
from armillary.data.feed._position import Position
from armillary.data.feed._reader import BatchReader
from armillary.data.feed._split import Splitter
from armillary.data.feed._stream import SourceBatch
from armillary.data.sources._arrays import IndexedDataset
from armillary.errors import BatchSizeError


def check_last_batch(
    reader: BatchReader, trace: Callable[[Piece], Any] | None = None
) -> None:
    """Raises if a step cannot run on the last batch of a pass.

    Args:
        reader: The reader of the only dataset, after its first batch was read.
        trace: Traces the step for a batch, to see whether the step refuses it.

    Raises:
        BatchSizeError: If the replicas cannot share the batch, or the step refuses it.
    """
    source = reader.data.source
    if not isinstance(source, IndexedDataset) or reader.data.per_replica_batches:
        return
    is_full = source.is_endless or source.drop_remainder
    num_rows = source.num_examples % source.batch_size
    place = reader.used.source or {"index": 0}
    # After a restore with a different batch size, the last batch may have another size.
    is_known = place["index"] % source.batch_size == 0
    if is_full or not num_rows or not is_known:
        return
    with _explaining(source, num_rows):
        for piece in _split(reader, num_rows):
            if trace is not None:
                trace(piece)


def _split(reader: BatchReader, num_rows: int) -> Iterator[Piece]:
    """Yields the pieces of a batch with `num_rows` rows; nothing if it is dropped."""
    spec = reader.data.types
    if spec is None:
        return

    def make_rows(leaf: Any) -> np.ndarray:
        # A view of one number, because only the shape and the dtype are used.
        number = np.zeros((), leaf.dtype)
        return np.broadcast_to(number, (num_rows, *leaf.shape[1:]))

    rows = jax.tree.map(make_rows, spec)
    before = Position(full_size=reader.data.source.full_size)
    splitter = Splitter(reader.data, in_pieces=False)
    yield from splitter.split(iter([SourceBatch(rows, before)]), before)


@contextmanager
def _explaining(source: IndexedDataset, num_rows: int) -> Iterator[None]:
    try:
        yield
    except BatchSizeError as error:
        raise BatchSizeError(
            f"`train_dataset` has {source.num_examples} examples in batches of "
            f"{source.batch_size}, so the last batch of each pass has {num_rows}, and "
            f"no step can run on it: {error}\nNo step has run yet. Leave that batch "
            "out (`drop_remainder=True`), let batches run across the ends of passes "
            "(`repeat=True`), or use another batch size."
        ) from error
