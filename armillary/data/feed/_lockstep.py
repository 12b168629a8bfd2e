"""Keeps processes together: each must have the same to run at the same time.

A process without data, or with batches of another shape, would leave the others waiting
in the middle of a program. So they compare each chunk before they run it.

Where a function made one data set for each process, they may differ in length. A
compiled step runs on all processes or on none, and with one shape. So the processes
tell each other what they are going to have next, and all come to the same sequence::

                process 0    process 1    what runs
    training    8 8 8        8 8          8 on both, twice; then training ends
    evaluation  8 8 8        8 3          8 on both; 8 and 8 on process 0 alone; then
                                          3 on process 1 alone

A process without data in a step takes part with copies of what it had before, which
have no effect.

Only the main thread may agree on something. So a background thread reads the pieces of
this process ahead, and the agreement about them comes between two loops, where they are
read by then, or just before their use.
"""

import hashlib
import itertools
import json
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np

from armillary.data._layout import Active, Peers
from armillary.data.feed._position import Position
from armillary.data.feed._prefetch import Prefetcher
from armillary.data.feed._split import HostBatch
from armillary.data.sources._arrays import IndexedDataset
from armillary.data.sources._batch import canonical_dtype, describe_shapes
from armillary.errors import BatchSizeError, PeerError
from armillary.typing import PyTree

MOST_OFFERS = 10
"""How many pieces of a process are agreed on at once, and read ahead."""
_TOPIC = "the next batches"


class _Offer(NamedTuple):
    """What a process reports about one of its pieces.

    Attributes:
        num_rows: Examples for each replica.
        num_active: How many of the process's replicas have data.
        is_last: As in `HostBatch`.
        kind: Equal for batches that differ in `num_rows` at most.
        shapes: For messages.
    """

    num_rows: int
    num_active: int
    is_last: bool
    kind: str
    shapes: str


class _Turn(NamedTuple):
    """One step that all processes take.

    Attributes:
        offer: The piece, as the first process with data described it.
        processes: The processes that have data.
        active: Which replicas have data.
        is_last: As in `HostBatch`.
    """

    offer: _Offer
    processes: list[int]
    active: Active
    is_last: bool


class _Own:
    """The pieces of this process that are offered to all, and not used yet.

    Args:
        pieces: What this process has read.

    Attributes:
        waiting: The pieces, the next one first.
        num_turns: How many steps are agreed on that were not taken yet.
    """

    def __init__(self, pieces: Prefetcher[HostBatch]) -> None:
        self._pieces = pieces
        self.waiting: deque[HostBatch] = deque()
        self.num_turns = 0

    def fill(self) -> None:
        """Waits for as many pieces as are offered at once, or for the end."""
        missing = MOST_OFFERS - len(self.waiting)
        self.waiting.extend(itertools.islice(self._pieces, missing))

    def offers(self) -> list[_Offer]:
        """Describes the pieces."""
        return [_offer(piece) for piece in self.waiting]

    def say(self) -> list[_Offer] | None:
        """Describes the pieces for the other processes, if all of them were read."""
        while len(self.waiting) < MOST_OFFERS and self._pieces.ahead is not None:
            self.waiting.append(next(self._pieces))
        is_all = len(self.waiting) == MOST_OFFERS or self._pieces.has_ended
        return self.offers() if is_all and not self.num_turns else None


@dataclass(frozen=True)
class Lockstep:
    """Makes one sequence of batches out of what each process reads for itself.

    Args:
        peers: The processes.
        num_own: How many replicas this process has.
        exact: Whether every example is used, as in `Splitter`.
    """

    peers: Peers
    num_own: int
    exact: bool

    def align(
        self, pieces: Prefetcher[HostBatch], position: Position
    ) -> Iterator[HostBatch]:
        """Yields the same number of pieces on all processes, in equal shapes."""
        own = _Own(pieces)
        last: HostBatch | None = None
        is_first_round = True
        starts = self._exchange_starts()
        while True:
            offers = [[_Offer(*offer) for offer in said] for said in self._ask(own)]
            if is_first_round and self.exact:
                _check_all_have_some(offers)
            is_first_round = False
            turns = list(self._take_turns(offers, starts))
            own.num_turns = len(turns)
            for turn in turns:
                own.num_turns -= 1
                if self.peers.index in turn.processes:
                    last = own.waiting.popleft()
                    position, arrays = last.position, last.arrays
                else:
                    arrays = _copy_rows((last or own.waiting[0]).arrays, turn.offer)
                yield HostBatch(arrays, turn.active, starts[-1], position, turn.is_last)
            if not turns:
                return

    def _ask(self, own: "_Own") -> list[Any]:
        """Returns what all processes offer: what they said last, or say now."""
        said = self.peers.boundary.take(own.say)
        if said is not None:
            return said
        with self.peers.announcing_errors():
            own.fill()
        text = json.dumps(own.offers())
        return [json.loads(said) for said in self.peers.gather(_TOPIC, text)]

    def _exchange_starts(self) -> list[int]:
        """Returns the number of the first replica of each process."""
        counts = self.peers.gather("replicas", str(self.num_own))
        return [0, *itertools.accumulate(map(int, counts))]

    def _take_turns(
        self, offers: list[list[_Offer]], starts: list[int]
    ) -> Iterator[_Turn]:
        """Yields the steps that follow from the offers; all processes find the same."""
        has_more = [len(own) == MOST_OFFERS for own in offers]
        queues = [deque(own) for own in offers]
        while any(queues):
            empty = [index for index, queue in enumerate(queues) if not queue]
            if any(has_more[index] for index in empty):
                return
            if empty and not self.exact:
                return
            heads = {index: queue[0] for index, queue in enumerate(queues) if queue}
            _check_kinds(heads, self.exact)
            offer = max(heads.values(), key=lambda head: head.num_rows)
            processes = [
                index
                for index, head in heads.items()
                if head.num_rows == offer.num_rows
            ]
            active = [
                starts[index] + replica
                for index in processes
                for replica in range(heads[index].num_active)
            ]
            is_last = all(heads[index].is_last for index in processes)
            for index in processes:
                queues[index].popleft()
            yield _Turn(offer, processes, _as_active(active), is_last)


def _offer(piece: HostBatch) -> _Offer:
    leaves, treedef = jax.tree.flatten(piece.arrays)
    described = [(leaf.shape[2:], str(canonical_dtype(leaf))) for leaf in leaves]
    kind = hashlib.sha256(f"{treedef} {described}".encode()).hexdigest()[:16]
    assert isinstance(piece.num_active, int)
    return _Offer(
        leaves[0].shape[1],
        piece.num_active,
        piece.is_last,
        kind,
        describe_shapes(piece.arrays)[:500],
    )


def _check_all_have_some(offers: list[list[_Offer]]) -> None:
    # A process without any does not know what an example looks like.
    without = [index for index, own in enumerate(offers) if not own]
    if without and len(without) < len(offers):
        raise BatchSizeError(
            f"Process {without[0]} of {len(offers)} has no example at all, so that it "
            "cannot take part in a step. Give every process at least one batch, or "
            "distribute one data set over all of them."
        )


def _check_kinds(heads: dict[int, _Offer], exact: bool) -> None:
    kinds = {(head.kind, None if exact else head.num_rows) for head in heads.values()}
    if len(kinds) > 1:
        shown = "\n".join(
            f"  process {index}: {head.shapes}" for index, head in heads.items()
        )
        raise BatchSizeError(
            "The batches of the processes differ, but in one step all must have one "
            f"structure and shape (replicas, examples, ...):\n{shown}\n"
            "Batch the data of all processes alike, with `drop_remainder=True` for "
            "training."
        )


def _as_active(active: list[int]) -> Active:
    count = len(active)
    return count if active == list(range(count)) else tuple(active)


def _copy_rows(arrays: PyTree, offer: _Offer) -> PyTree:
    """Returns arrays of the offered size, made of rows that were there before."""

    def copy(leaf: Any) -> np.ndarray:
        rows = np.minimum(np.arange(offer.num_rows), leaf.shape[1] - 1)
        return np.take(leaf, rows, axis=1)

    return jax.tree.map(copy, arrays)


def describe_chunk(chunk: Any, datasets: Sequence[Any]) -> str:
    """Returns a text that is equal for chunks of these data sets that may run together.

    Positions that a library has made may hold what differs between processes, such as
    seeds of its workers, and in data of their own processes are where they are.
    """
    if chunk is None:
        return "no more data"
    places = [
        f"epoch {position.epoch}"
        + (f", {position.source}" if isinstance(dataset.source, IndexedDataset) else "")
        for position, dataset in zip(chunk.positions[0], datasets, strict=True)
        if not dataset.is_agreed
    ]
    return "; ".join([str(chunk), *places])


def check_same_chunk(name: str, texts: list[str]) -> None:
    """Raises if the processes have described different chunks to run."""
    if len(set(texts)) == 1:
        return
    shown = "\n".join(
        f"  process {index} of {len(texts)}: {text}" for index, text in enumerate(texts)
    )
    raise PeerError(
        f"The processes have different data for `{name}`:\n{shown}\n"
        "A data set that is distributed over all processes must be the same on each, "
        "in the same order, and no process may take batches of it alone. Where each "
        "reads data of its own, use a function with an `input_context` "
        "(`make_distributed_dataset`)."
    )
