"""Makes one sequence of steps from the datasets of several processes.

All processes must run the same steps at the same time. If a function made one dataset
for each process, the datasets may differ in length. So the processes exchange the
sizes of their next batches, and derive the same sequence::

                process 0    process 1    steps
    training    8 8 8        8 8          8 on both, twice; then training ends
    evaluation  8 8 8        8 3          8 on both; 8 and 8 on process 0 alone; then
                                          3 on process 1 alone

A process without data takes part with copies, which have no effect: its replicas are
not active. If one replica spans all processes, the rows of a step come from several
input pipelines, and only a mask can hide some of them. So without `remainder="pad"`,
pipelines must then have equal batches.

Only the main thread may exchange messages, between two loops or before a batch is used.
Other threads only read ahead.
"""

import hashlib
import itertools
import json
import zlib
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from armillary._checks import list_lines
from armillary.data._layout import Active
from armillary.data.feed._ahead import Peekable
from armillary.data.feed._input import Input
from armillary.data.feed._piece import Piece, hide_rows
from armillary.data.feed._position import Position
from armillary.data.sources._batch import canonical_dtype, describe_shapes
from armillary.errors import BatchSizeError, PeerError
from armillary.typing import PyTree

MAX_OFFERS = 10
"""The number of pieces of a process that are read ahead and agreed on together."""


class _Offer(NamedTuple):
    """The next piece of one process, as it tells the others about it."""

    num_rows: int  # examples for each replica
    active: list[int]  # the replicas of the process that have data
    is_last: bool  # as in `Piece`
    kind: str  # equal for batches that differ at most in `num_rows`
    mark: str  # tells a batch from others, if processes must have the same
    shapes: str  # for messages


class _Turn(NamedTuple):
    """One step that all processes run together."""

    num_rows: int  # examples for each replica
    processes: list[int]  # the processes that have data
    active: Active  # the replicas that have data
    is_last: bool  # whether the step ends its batch


class Lockstep:
    """Makes one sequence of batches from the datasets of several processes."""

    def __init__(
        self,
        pieces: Peekable[Piece],
        data: Input,
        in_pieces: bool,
        most_offers: int,
    ) -> None:
        layout = data.layout
        self._most_offers = most_offers
        self._pieces = pieces
        self._layout = layout
        self._in_pieces = in_pieces
        self._peers = layout.peers
        self._axis = 1 if layout.stacked else 0  # of the examples of a replica
        self._can_hide = layout.stacked or data.options.remainder == "pad"
        is_cut = not layout.stacked and data.options.remainder == "drop"
        self._ends_together = not in_pieces or is_cut
        # Pieces that were offered to all processes and not used yet.
        self._waiting: deque[Piece] = deque()
        # The number of agreed steps that are not used yet.
        self._num_turns = 0

    def align(self, position: Position) -> Iterator[Piece]:
        """Yields the same number of pieces on all processes, in equal shapes."""
        last: Piece | None = None
        offers = self._ask()
        without = [index for index, own in enumerate(offers) if not own]
        is_only_some = 0 < len(without) < len(offers)
        if self._in_pieces and is_only_some:
            # It cannot make copies, because it has never seen an example.
            raise BatchSizeError(
                f"Process {without[0]} of {len(offers)} has no example at all, so it "
                "cannot take part in a step. Give every process at least one batch, or "
                "distribute one dataset over all processes."
            )

        while turns := self._find_turns(offers):
            self._num_turns = len(turns)
            for turn in turns:
                self._num_turns -= 1
                if self._peers.index in turn.processes:
                    last = self._waiting.popleft()
                    position = last.position
                    arrays = last.arrays
                else:
                    # This process has no effect on the step.
                    known = last or self._waiting[0]
                    arrays = _copy_rows(known.arrays, turn.num_rows, self._axis)
                    if not self._layout.stacked:
                        arrays = hide_rows(arrays)
                count = self._layout.num_replicas
                yield Piece(arrays, turn.active, count, position, turn.is_last)
            offers = self._ask()

    def _find_turns(self, offers: list[list[_Offer]]) -> list[_Turn]:
        """Returns the steps that follow from the offers.

        Raises:
            PeerError: If processes of one input pipeline have different batches.
            BatchSizeError: If batches do not fit together.
        """
        for processes in self._layout.pipelines:
            _check_same_batches(processes, offers)
        turns = list(_find_turns(offers, self._ends_together, self._most_offers))
        if self._can_hide:
            return turns
        for turn in turns:
            if len(turn.processes) < len(offers):
                missing = set(range(len(offers))) - set(turn.processes)
                raise BatchSizeError(
                    f"In an evaluation, process {turn.processes[0]} of {len(offers)} "
                    f"has a batch of {turn.num_rows} examples for a step, but process "
                    f"{min(missing)} has none of this size. Each step takes rows of "
                    "all input pipelines. Use "
                    '`armillary.data.InputOptions(remainder="pad")` and the `mask`, or '
                    '`"drop"` to leave these examples out, or distribute one dataset '
                    "over all processes (`strategy.distribute_dataset`)."
                )
        return turns

    def _ask(self) -> list[list[_Offer]]:
        """Returns the offers of all processes, exchanged before or now."""
        answers = self._peers.boundary.take(self._own_value)
        if answers is None:
            with self._peers.announcing_errors():
                missing = self._most_offers - len(self._waiting)
                self._waiting.extend(itertools.islice(self._pieces, missing))
            own = json.dumps([self._offer(piece) for piece in self._waiting])
            texts = self._peers.gather("the next batches", own)
            answers = [json.loads(text) for text in texts]

        by_process: list[list[_Offer]] = []
        for offers in answers:
            by_process.append([_Offer(*offer) for offer in offers])
        return by_process

    def _own_value(self) -> list[_Offer] | None:
        """Returns the offers for the other processes, if all of them were read."""
        most = self._most_offers
        while len(self._waiting) < most and self._pieces.ahead is not None:
            self._waiting.append(next(self._pieces))

        are_all_read = len(self._waiting) == most or self._pieces.has_ended
        if self._num_turns or not are_all_read:
            return None
        return [self._offer(piece) for piece in self._waiting]

    def _offer(self, piece: Piece) -> _Offer:
        """Returns the description of a piece for the other processes."""
        leaves, treedef = jax.tree.flatten(piece.arrays)
        first = self._axis + 1
        types = [(leaf.shape[first:], str(canonical_dtype(leaf))) for leaf in leaves]
        digest = hashlib.sha256(f"{treedef} {types}".encode()).hexdigest()
        local = self._layout.local_replicas
        return _Offer(
            num_rows=leaves[0].shape[self._axis],
            active=[local[replica] for replica in piece.active],
            is_last=piece.is_last,
            kind=digest[:16],
            mark=piece.mark,
            shapes=describe_shapes(piece.arrays)[:500],
        )


def _check_same_batches(
    processes: Sequence[int], offers: Sequence[Sequence[_Offer]]
) -> None:
    """Raises if processes of one input pipeline have different batches.

    Raises:
        PeerError: If batches or their number differ.
    """
    first, *others = processes
    for other in others:
        if offers[other] != offers[first]:
            lines: list[str] = []
            for index in (first, other):
                own = offers[index]
                lines.append(f"process {index}: {len(own)} batches, {_mark(own)}")
            shown = list_lines(lines)
            raise PeerError(
                f"Processes {first} and {other} are one input pipeline, because their "
                "devices hold the same examples, but they have different batches:\n"
                f"{shown}\nBuild the dataset only from `num_input_pipelines` and "
                "`input_pipeline_id` of the `input_context`, with the same seeds, and "
                "not from the number of the process."
            )


def _mark(offers: Sequence[_Offer]) -> str:
    marks = "".join(f"{offer.num_rows} {offer.kind} {offer.mark}" for offer in offers)
    return f"checksum {zlib.crc32(marks.encode()):08x}"


def _find_turns(
    offers: list[list[_Offer]], ends_together: bool, most_offers: int
) -> Iterator[_Turn]:
    """Yields the steps that follow from the offers.

    With `ends_together`, steps end with the process that has the fewest batches.
    """
    has_more = [len(own) == most_offers for own in offers]
    queues = [deque(own) for own in offers]
    while any(queues):
        heads = {index: queue[0] for index, queue in enumerate(queues) if queue}
        empty = [index for index in range(len(queues)) if index not in heads]
        is_unknown = any(has_more[index] for index in empty)
        if empty and (is_unknown or ends_together):
            return

        kinds = {
            (head.kind, head.num_rows if ends_together else 0)
            for head in heads.values()
        }
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

        # The processes with the largest batches run first, alone if others have less.
        most = max(head.num_rows for head in heads.values())
        processes = [index for index, head in heads.items() if head.num_rows == most]
        taken = [queues[index].popleft() for index in processes]
        # A replica that spans all processes is one.
        active = dict.fromkeys(replica for offer in taken for replica in offer.active)
        yield _Turn(
            num_rows=most,
            processes=processes,
            active=tuple(active),
            is_last=all(offer.is_last for offer in taken),
        )


def _copy_rows(arrays: PyTree, num_rows: int, axis: int) -> PyTree:
    """Returns arrays with `num_rows` examples along an axis, copied from known rows."""

    def copy(leaf: Any) -> np.ndarray:
        rows = np.minimum(np.arange(num_rows), leaf.shape[axis] - 1)
        return np.take(leaf, rows, axis=axis)

    return jax.tree.map(copy, arrays)
