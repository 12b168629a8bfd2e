"""Feeds a loop: reads datasets ahead, and keeps the positions that were used.

Only `commit` moves the positions that datasets report. If batches are lost before that
(by Ctrl-C, or when a position is set), they are read again from there.
"""

import contextlib
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Generic, TypeVar

from armillary._checks import list_lines
from armillary.cluster._peers import ALONE
from armillary.data.feed._ahead import Peekable, read_ahead
from armillary.data.feed._piece import Piece
from armillary.data.feed._position import Position
from armillary.data.feed._reader import BatchReader
from armillary.errors import DatasetStateError, PeerError

if TYPE_CHECKING:
    from armillary.data.feed._chunks import Chunk

_CLOSE_TIMEOUT_SECONDS = 5.0


T = TypeVar("T", bound="Chunk | Piece")
"""The batches of some steps; `str` describes their shapes."""


class Feed(Generic[T]):
    """Reads the batches of a loop.

    A chunk stays the current chunk until all of its steps are committed, so no batch is
    lost. If the feed has the `name` of a step, processes compare their chunks.
    """

    def __init__(self, readers: Sequence[BatchReader], name: str | None = None) -> None:
        # They must not be used while a thread reads.
        self.readers = list(readers)
        self._name = name
        # Steps without data are the same in all processes.
        is_compared = name is not None and bool(readers)
        self._peers = readers[0].data.layout.peers if is_compared else ALONE
        # Whether the next chunks are known to be the same in all processes.
        self._is_alike = self._peers.is_alone
        weakref.finalize(self, _close, tuple(self.readers), 0.0)
        self._build: Callable[[Sequence[BatchReader]], Iterator[T]] | None = None
        self._prefetch = 0
        self.queue: Peekable[T] | None = None  # The chunks, after the first read.
        self._is_cut_off = False
        # Batches that a step in Python took before it failed. They come first again,
        # because the data may be unable to go back.
        self._returned: list[deque[Piece]] = [deque() for _ in self.readers]
        self.offset = 0  # The number of steps of the current chunk that were used.
        self.is_started = False
        self.is_closed = False
        # Datasets with unused batches, because another dataset of the step had ended.
        self.with_leftovers: set[int] = set()

    def start(
        self, build: Callable[[Sequence[BatchReader]], Iterator[T]], prefetch: int
    ) -> None:
        """Sets the function that builds chunks from batches; nothing is read yet."""
        self._build = build
        self._prefetch = prefetch
        self.is_started = True

    @property
    def positions(self) -> tuple[Position, ...]:
        """The position of each dataset after the committed steps."""
        return tuple(reader.used for reader in self.readers)

    @property
    def is_repositionable(self) -> bool:
        return all(reader.data.is_repositionable for reader in self.readers)

    @property
    def chunk(self) -> T | None:
        """The current chunk; None if `next_chunk` must read one."""
        return None if self.queue is None else self.queue.current

    def peek(self) -> list[Piece | None]:
        """Returns the next batch of each dataset, or None at its end.

        It may be called only before `start`.
        """
        if self.is_closed:
            return [None] * len(self.readers)
        with self._peers.announcing_errors(), self.reading():
            batches = self.heads()
        self.note_ends()
        return batches

    def heads(self) -> list[Piece | None]:
        """Returns the next batch of each dataset, or None at its end."""
        heads: list[Piece | None] = []
        for returned, reader in zip(self._returned, self.readers, strict=True):
            heads.append(returned[0] if returned else reader.peek())
        return heads

    def take(self, index: int) -> Iterator[Piece]:
        """Yields the next batches of a dataset, for a step in Python."""
        reader = self.readers[index]
        returned = self._returned[index]
        while returned:
            piece = returned.popleft()
            reader.position = piece.position
            yield piece
        # Not `yield from`, which closes the reader when the step drops this generator.
        for piece in reader:
            yield piece

    def give_back(self, taken: Sequence[Sequence[Piece]]) -> None:
        """Returns the batches that a step took from each dataset before it failed."""
        for index, reader in enumerate(self.readers):
            self._returned[index].extendleft(reversed(taken[index]))
            reader.position = reader.used

    def next_chunk(self) -> T | None:
        """Returns the chunk that holds the next step, at `offset`; None at the end."""
        chunk = self.chunk
        if chunk is not None or self.is_closed:
            return chunk
        with self._peers.announcing_errors():
            chunk = self._read()
        if not self._is_alike:
            self._check_alike(chunk)
        return chunk

    def _check_alike(self, chunk: T | None) -> None:
        """Raises if the processes have different next chunks."""
        peers = self._peers
        texts = peers.boundary.take(self._own_value)
        if not texts:
            texts = peers.gather(f"the data of {self._name}", self._describe(chunk))
        if len(set(texts)) > 1:
            shown = [f"process {i}: {text}" for i, text in enumerate(texts)]
            raise PeerError(
                f"The processes have different data for `{self._name}`:\n"
                f"{list_lines(shown)}\nA dataset that is distributed over all "
                "processes must be the same in each process, in the same order. A "
                "shuffle of `tf.data` needs a seed (`shuffle(1000, seed=0)`). If "
                "each process reads data of its own, use a function with an "
                "`input_context`."
            )
        # If processes agree on each batch, equal first chunks mean equal chunks.
        self._is_alike = all(reader.data.is_agreed for reader in self.readers)

    def _describe(self, chunk: T | None) -> str:
        """Returns a text that is equal for chunks that processes may run together."""
        if chunk is None:
            return "no more data"
        places = []
        for reader, position in zip(self.readers, chunk.positions[0], strict=True):
            data = reader.data
            if data.is_agreed:
                continue
            places.append(f"epoch {position.epoch}")
            # Not for other libraries, whose positions may differ between processes.
            if data.is_indexed:
                places.append(str(position.source))
        return "; ".join([str(chunk), *places])

    def _own_value(self) -> str | None:
        """Describes the next chunk for the other processes, if it has been read."""
        queue = self.queue
        if queue is None or queue.current is not None:
            return None
        is_known = queue.ahead is not None or queue.has_ended
        return self._describe(queue.ahead) if is_known else None

    def _read(self) -> T | None:
        """Returns the next chunk, or `None` at the end of the data."""
        self._recover()
        if self.queue is None:
            assert self._build is not None
            self.queue = read_ahead(self._build(self.readers), self._prefetch, self)
        # Ctrl-C does not interrupt a background thread, so it loses no batches.
        context = contextlib.nullcontext() if self._prefetch else self.reading()
        with context:
            try:
                return self.queue.head()
            except StopIteration:
                self.note_ends(with_rest=True)
                return None

    def read_on(self) -> None:
        if self.queue is not None:
            self.queue.read_on()

    def commit(self, num_steps: int) -> None:
        """Marks steps of the current chunk as used, which moves the positions."""
        queue = self.queue
        chunk = self.chunk
        assert queue is not None and chunk is not None
        stop = self.offset + num_steps
        used = chunk.positions[stop - 1]
        for reader, position in zip(self.readers, used, strict=True):
            reader.used = position
        self.offset = stop % len(chunk.positions)
        if not self.offset:
            queue.pop()

    def commit_taken(self) -> None:
        """Marks all batches that were taken from `readers` as used."""
        for reader in self.readers:
            reader.used = reader.position

    def seek(self, positions: Sequence[Position]) -> None:
        """Drops batches that were read, and goes to other positions.

        After an error, no position is changed.
        """
        # Data that was interrupted and cannot go back remains broken.
        is_broken = self._is_cut_off and not self.is_repositionable
        self._is_cut_off = True
        if self.queue is not None:
            self.queue.close()
        self.queue = None
        self.offset = 0
        for returned in self._returned:
            returned.clear()
        if not self._peers.is_alone:
            # The answers that were exchanged describe the chunk we dropped, so discard
            # them.
            self._peers.boundary.take(self._own_value)

        try:
            self._reopen(positions)
        except Exception:
            self._reopen(self.positions)
            self._is_cut_off = is_broken
            raise
        for reader, position in zip(self.readers, positions, strict=True):
            reader.used = position
        self._is_cut_off = is_broken

    def _reopen(self, positions: Sequence[Position]) -> None:
        """Opens the sources that can go back, each at its position."""
        for reader, position in zip(self.readers, positions, strict=True):
            if reader.data.is_repositionable:
                reader.reopen(position)

    def close(self) -> None:
        """Releases the data; the positions are kept."""
        self.is_closed = True
        if self.queue is not None:
            self.queue.close(_CLOSE_TIMEOUT_SECONDS)
        self.queue = None
        _close(self.readers, _CLOSE_TIMEOUT_SECONDS)

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """Returns a context in which this thread reads, and Ctrl-C may lose batches."""
        self._recover()
        self._is_cut_off = True
        try:
            yield
        except Exception:
            self._is_cut_off = False  # Each later read raises the error again.
            raise
        self._is_cut_off = False

    def _recover(self) -> None:
        """Reads lost batches again after Ctrl-C, which ends a generator."""
        if not self._is_cut_off:
            return
        for reader in self.readers:
            if not reader.data.is_repositionable:
                raise DatasetStateError(
                    f"The source ({reader.data.name}) was interrupted (Ctrl-C) "
                    "while it was read, and cannot go back to the batches that were "
                    "lost. Make a new dataset, or use a source that can go back, such "
                    "as `armillary.data.from_arrays`."
                )
        self.seek(self.positions)

    def note_ends(self, *, with_rest: bool = False) -> None:
        """Marks passes as finished if all their batches were used.

        With `with_rest`, the last batches of an incomplete step count as used.
        """
        for index, reader in enumerate(self.readers):
            is_used = reader.used is reader.position
            if not is_used:
                self.with_leftovers.add(index)
            has_ended = reader.has_ended and not self._returned[index]
            if has_ended and (with_rest or is_used):
                reader.position = replace(reader.position, is_exhausted=True)
                reader.used = reader.position


def _close(readers: Sequence[BatchReader], timeout_seconds: float) -> None:
    for reader in readers:
        reader.close(timeout_seconds)
