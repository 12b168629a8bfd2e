"""Reads chunks ahead of the compiled loop that runs them."""

from collections.abc import Sequence

from armillary._checks import check_not_negative_int, check_positive_int
from armillary.data._chunk_builder import Chunk, ChunkBuilder
from armillary.data._prefetch import Prefetcher
from armillary.data._reader import HostReader

_CLOSE_TIMEOUT_SECONDS = 5.0


class ChunkReader:
    """Stacks and places the batches of many steps, ahead of their use.

    It takes the readers over: what it has read ahead is lost to them when it is closed,
    so keep one for as long as its readers.

    Args:
        readers: The data that a step takes, in order.
        batches_per_step: How many batches of each reader one step takes.
        steps_per_chunk: Most steps in one chunk.
        max_chunk_bytes: Most host memory of one chunk. A chunk has at least one step,
            however large.
        prefetch: How many chunks a background thread prepares ahead. 0 prepares them
            on demand.

    Raises:
        ValueError: If a number is out of range, or there is not one for each reader.
    """

    def __init__(
        self,
        readers: Sequence[HostReader],
        batches_per_step: Sequence[int],
        *,
        steps_per_chunk: int,
        max_chunk_bytes: int = 256 * 2**20,
        prefetch: int = 1,
    ) -> None:
        if not readers or len(readers) != len(batches_per_step):
            raise ValueError(
                f"`batches_per_step` is {list(batches_per_step)!r}, but there are "
                f"{len(readers)} readers. Give at least one reader, and one number for "
                "each."
            )
        self._readers = tuple(readers)
        self._prefetch = check_not_negative_int("prefetch", prefetch)
        self._builder = ChunkBuilder(
            self._readers,
            [check_positive_int("batches_per_step", n) for n in batches_per_step],
            check_positive_int("steps_per_chunk", steps_per_chunk),
            check_positive_int("max_chunk_bytes", max_chunk_bytes),
        )
        self._prefetcher: Prefetcher[Chunk | BaseException] | None = None
        self._is_closed = False
        for reader in self._readers:
            reader.attach(self._stop_reading_ahead)

    @property
    def is_ready(self) -> bool:
        """Whether `next_chunk` would return at once."""
        return self._is_closed or (
            self._prefetcher is not None and self._prefetcher.is_ready
        )

    def next_chunk(self) -> Chunk | None:
        """Returns the next chunk, or None if no whole step is left.

        The one after it is read from `read_on` on, while the device has work.

        Raises:
            BatchSizeError: If the batches of one step differ in shape.
        """
        if self._is_closed:
            return None
        if self._prefetcher is not None and self._prefetcher.was_interrupted:
            self._stop_reading_ahead()
        if self._prefetcher is None:
            self._prefetcher = Prefetcher(self._builder.build_chunks(), self._prefetch)
        try:
            chunk = self._prefetcher.take()
        except StopIteration:
            for reader in self._readers:
                reader.commit_end()
            return None
        if isinstance(chunk, BaseException):
            raise chunk
        return chunk

    def read_on(self) -> None:
        """Reads the next chunk ahead, in the background."""
        if self._prefetcher is not None:
            self._prefetcher.read_on()

    def rewind(self) -> None:
        """Drops what was read ahead; it is read again, from the positions committed."""
        self._stop_reading_ahead()

    def close(self) -> None:
        """Ends the background thread and closes the readers."""
        self._is_closed = True
        if self._prefetcher is not None:
            self._prefetcher.close(_CLOSE_TIMEOUT_SECONDS)
        for reader in self._readers:
            reader.close()

    def _stop_reading_ahead(self) -> None:
        if self._prefetcher is not None:
            self._prefetcher.close()
            self._prefetcher = None
            # Only one reader is about to move; the others lost what was read ahead.
            for reader in self._readers:
                reader.rewind()
