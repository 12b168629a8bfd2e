"""Reads one dataset from a position, in step with other processes.

All processes must run the same steps at the same time. If a function made one data set
for each process, the data sets may differ in length. So the processes exchange the
sizes of their next batches, and derive the same sequence::

                process 0    process 1    steps
    training    8 8 8        8 8          8 on both, twice; then training ends
    evaluation  8 8 8        8 3          8 on both; 8 and 8 on process 0 alone; then
                                          3 on process 1 alone

A process without data takes part with copies, which have no effect. Only the main
thread may exchange messages, between two loops or before a batch is used. Other threads
only read ahead.
"""

import hashlib
import itertools
import json
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import numpy as np

from armillary._checks import list_lines
from armillary.data._layout import Active, BatchLayout
from armillary.data.feed._ahead import Peekable, read_ahead
from armillary.data.feed._input import Input
from armillary.data.feed._piece import Piece
from armillary.data.feed._position import Position
from armillary.data.feed._split import Splitter
from armillary.data.feed._stream import SourceBatch
from armillary.data.sources._batch import canonical_dtype, describe_shapes
from armillary.errors import BatchSizeError
from armillary.typing import PyTree

_MOST_OFFERS = 10
"""The number of pieces of a process that are read ahead and agreed on together."""


class BatchReader:
    """Yields the pieces of a dataset's batches, to one thread at a time."""

    def __init__(
        self,
        data: Input,
        position: Position,
        batches: Peekable[SourceBatch],
        *,
        in_pieces: bool,
        reads_ahead: bool = True,
    ) -> None:
        is_exact = data.options.remainder == "exact"
        if data.is_agreed and is_exact and not in_pieces:
            raise ValueError(
                '`remainder` is "exact", but each process reads its own data, so rows '
                "would have to be sent between processes. Distribute one data set over "
                "all processes (`strategy.distribute_dataset`), or use "
                '`remainder="pad"`.'
            )
        self.data = data
        self._in_pieces = in_pieces
        self._most_offers = _MOST_OFFERS if reads_ahead else 1
        self._reads_ahead = reads_ahead
        self.used = position  # the position after the last batch that was used
        self.open(position, batches)

    def open(self, position: Position, batches: Peekable[SourceBatch]) -> None:
        data = self.data
        self.batches: Peekable[SourceBatch] | None = batches  # None once closed
        self.position = position  # the position after the last batch that was taken
        pieces = Splitter(data, in_pieces=self._in_pieces).split(batches, position)
        self._ahead: Peekable[Piece] | None = None
        if data.is_agreed:
            # A thread reads ahead the pieces that the processes must agree on.
            has_thread = self._reads_ahead and data.options.prefetch > 0
            num_ahead = self._most_offers if has_thread else 0
            ahead = self._ahead = read_ahead(pieces, num_ahead, self)
            lockstep = _Lockstep(ahead, data.layout, self._in_pieces, self._most_offers)
            pieces = lockstep.align(position)
        self._pieces = Peekable(pieces)

    def reopen(self, position: Position) -> None:
        """Drops batches that were read, and goes to another position."""
        self.close()
        self.open(position, self.data.read(position))

    def __iter__(self) -> "BatchReader":
        return self

    def __next__(self) -> Piece:
        batch = next(self._pieces)
        self.position = batch.position
        return batch

    def peek(self) -> Piece | None:
        """Returns the next batch without taking it, or None at the end."""
        try:
            return self._pieces.head()
        except StopIteration:
            return None

    @property
    def has_ended(self) -> bool:
        return self._pieces.has_ended

    def close(self, timeout_seconds: float | None = None) -> None:
        """Ends the reading thread, because a source serves one reader at a time."""
        if self._ahead is not None:
            self._ahead.close(timeout_seconds)
        self._pieces.close()
        self.batches = None


def place_pieces(readers: Sequence[BatchReader]) -> Iterator[Piece]:
    (reader,) = readers
    for piece in reader:
        yield replace(piece, arrays=reader.data.gather.place(piece))


class _Offer(NamedTuple):
    num_rows: int  # examples for each replica
    active: list[int]  # the replicas of the process that have data
    is_last: bool  # as in `Piece`
    kind: str  # equal for batches that differ at most in `num_rows`
    shapes: str  # for messages


class _Lockstep:
    """Makes one sequence of batches from the data sets of several processes."""

    def __init__(
        self,
        pieces: Peekable[Piece],
        layout: BatchLayout,
        in_pieces: bool,
        most_offers: int,
    ) -> None:
        assert layout.peers is not None
        self._most_offers = most_offers
        self._pieces = pieces
        self._layout = layout
        self._in_pieces = in_pieces
        self._peers = layout.peers
        # Pieces that were offered to all processes and not used yet.
        self._waiting: deque[Piece] = deque()
        # The number of agreed steps that are not used yet.
        self._num_turns = 0

    def align(self, position: Position) -> Iterator[Piece]:
        """Yields the same number of pieces on all processes, in equal shapes."""
        last: Piece | None = None
        offers = self._ask()
        without = [index for index, own in enumerate(offers) if not own]
        if self._in_pieces and without and len(without) < len(offers):
            # It cannot make copies, because it has never seen an example.
            raise BatchSizeError(
                f"Process {without[0]} of {len(offers)} has no example at all, so it "
                "cannot take part in a step. Give every process at least one batch, or "
                "distribute one data set over all processes."
            )
        while turns := list(_find_turns(offers, self._in_pieces)):
            self._num_turns = len(turns)
            for num_rows, processes, active, is_last in turns:
                self._num_turns -= 1
                if self._peers.index in processes:
                    last = self._waiting.popleft()
                    position = last.position
                    arrays = last.arrays
                else:
                    known = last or self._waiting[0]
                    arrays = _copy_rows(known.arrays, num_rows)
                count = self._layout.num_replicas
                yield Piece(arrays, active, count, position, is_last)
            offers = self._ask()

    def _ask(self) -> list[list[_Offer]]:
        """Returns the offers of all processes, exchanged before or now."""
        answers = self._peers.boundary.take(self._say)
        if answers is None:
            with self._peers.announcing_errors():
                missing = self._most_offers - len(self._waiting)
                self._waiting.extend(itertools.islice(self._pieces, missing))
            text = json.dumps([self._offer(piece) for piece in self._waiting])
            texts = self._peers.gather("the next batches", text)
            answers = [json.loads(text) for text in texts]
        return [[_Offer(*offer) for offer in own] for own in answers]

    def _say(self) -> list[_Offer] | None:
        """Returns the offers for the other processes, if all of them were read."""
        most = self._most_offers
        while len(self._waiting) < most and self._pieces.ahead is not None:
            self._waiting.append(next(self._pieces))
        is_all = len(self._waiting) == most or self._pieces.has_ended
        if self._num_turns or not is_all:
            return None
        return [self._offer(piece) for piece in self._waiting]

    def _offer(self, piece: Piece) -> _Offer:
        leaves, treedef = jax.tree.flatten(piece.arrays)
        described = [(leaf.shape[2:], str(canonical_dtype(leaf))) for leaf in leaves]
        kind = hashlib.sha256(f"{treedef} {described}".encode()).hexdigest()[:16]
        assert isinstance(piece.num_active, int)
        active = list(self._layout.local_replicas[: piece.num_active])
        shapes = describe_shapes(piece.arrays)[:500]
        return _Offer(leaves[0].shape[1], active, piece.is_last, kind, shapes)


def _find_turns(
    offers: list[list[_Offer]], in_pieces: bool
) -> Iterator[tuple[int, list[int], Active, bool]]:
    """Yields the steps that follow from the offers.

    A step is a number of rows, the processes and the replicas with data, and whether it
    ends its batch.
    """
    has_more = [len(own) == _MOST_OFFERS for own in offers]
    queues = [deque(own) for own in offers]
    while any(queues):
        heads = {index: queue[0] for index, queue in enumerate(queues) if queue}
        empty = [index for index in range(len(queues)) if index not in heads]
        if empty and (not in_pieces or any(has_more[index] for index in empty)):
            return
        kinds = {(head.kind, in_pieces or head.num_rows) for head in heads.values()}
        if len(kinds) > 1:
            shown = list_lines(
                f"process {index}: {head.shapes}" for index, head in heads.items()
            )
            raise BatchSizeError(
                "The batches of the processes differ, but in one step all must have "
                f"one structure and shape (replicas, examples, ...):\n{shown}\n"
                "Batch the data of all processes in the same way, with "
                "`drop_remainder=True` for training."
            )
        most = max(head.num_rows for head in heads.values())
        processes = [index for index, head in heads.items() if head.num_rows == most]
        taken = [queues[index].popleft() for index in processes]
        active = [replica for offer in taken for replica in offer.active]
        is_first = active == list(range(len(active)))
        count = len(active) if is_first else tuple(active)
        yield most, processes, count, all(offer.is_last for offer in taken)


def _copy_rows(arrays: PyTree, num_rows: int) -> PyTree:
    """Returns arrays with `num_rows` examples, copied from known rows."""

    def copy(leaf: Any) -> np.ndarray:
        rows = np.minimum(np.arange(num_rows), leaf.shape[1] - 1)
        return np.take(leaf, rows, axis=1)

    return jax.tree.map(copy, arrays)
