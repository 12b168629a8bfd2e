"""Feeds of datasets, opened as loops open them."""

import gc
from collections.abc import Callable
from typing import Any

from armillary.data import DistributedDataset, _dataset
from armillary.data.feed._chunks import Chunk, ChunkBuilder
from armillary.data.feed._feed import Feed
from armillary.data.feed._reader import BatchReader
from tests import patience


def open_feed(
    *datasets: DistributedDataset,
    in_pieces: bool = False,
    name: str | None = None,
    reads_ahead: bool = True,
) -> Feed[Any]:
    """Returns a feed that was not started."""
    return _dataset.open_feed(
        datasets,
        in_pieces=in_pieces,
        begins_anew=in_pieces,
        name=name,
        reads_ahead=reads_ahead,
    )


def open_reader(
    dataset: DistributedDataset, *, in_pieces: bool = False, reads_ahead: bool = True
) -> BatchReader:
    """Returns what reads the next pass over a dataset."""
    feed = open_feed(dataset, in_pieces=in_pieces, reads_ahead=reads_ahead)
    (reader,) = feed.readers
    vars(reader)["its_feed"] = feed  # With the feed, its readers are closed.
    return reader


def open_chunks(
    *datasets: DistributedDataset,
    batches_per_step: tuple[int, ...] = (1,),
    in_pieces: bool = False,
    prefetch: int = 1,
    **options: int,
) -> Feed[Chunk]:
    """Returns a feed of chunks; `ChunkBuilder` takes the `options`."""
    feed = open_feed(*datasets, in_pieces=in_pieces)
    feed.start(ChunkBuilder(batches_per_step, **options).build, prefetch)  # pyright: ignore[reportArgumentType]
    return feed


def read_chunks(feed: Feed[Chunk]) -> list[Chunk]:
    """Returns all chunks, and marks their steps as used."""
    chunks: list[Chunk] = []
    while (chunk := feed.next_chunk()) is not None:
        chunks.append(chunk)
        feed.commit(chunk.num_steps)
    return chunks


def wait_until(condition: Callable[[], bool]) -> None:
    """Waits until a condition holds, and lets go of what nobody holds meanwhile."""

    def holds() -> bool:
        gc.collect()
        return condition()

    patience.wait_until(holds)
