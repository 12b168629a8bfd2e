"""The shares that each process has in memory, and the choice of a whole snapshot.

All processes exchange their offers, and then find the same answers.
"""

import dataclasses
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

from armillary.checkpoint.memory._exchange import Address
from armillary.checkpoint.memory._share import Place, Snapshot


class Holder(NamedTuple):
    """A process that has a share, and the place of the share there."""

    process: int
    place: Place


@dataclasses.dataclass(frozen=True)
class Offer:
    """The facts that a process sends to the others when they meet."""

    machine: str
    address: Address | None  # `None` if the process is alone.
    free_bytes: int
    shares: list[tuple[Place, Snapshot]]
    # From process 0: its folder, the identity of the directory, the time of its newest
    # checkpoint, and the name of a snapshot to skip.
    folder: str = ""
    run: str = ""
    saved_at: float = 0.0
    skipped: str = ""

    def as_text(self) -> str:
        """Returns the offer as JSON."""
        return json.dumps(dataclasses.asdict(self))


def parse_offer(text: str) -> Offer:
    """Returns an offer from its text."""
    fields = json.loads(text)
    address = fields.pop("address")
    shares: list[tuple[Place, Snapshot]] = []
    for place, facts in fields.pop("shares"):
        shares.append((Place(*place), Snapshot(**facts)))
    found = None if address is None else Address(*address)
    return Offer(address=found, shares=shares, **fields)


class Candidate(NamedTuple):
    """A snapshot, and the processes that hold each of its shares."""

    snapshot: Snapshot
    holders: Mapping[int, Sequence[Holder]]

    @property
    def num_missing(self) -> int:
        return self.snapshot.count - len(self.holders)

    def spread(self) -> dict[int, Holder]:
        """Returns one holder of each share; all processes serve about as many."""
        num_taken: dict[int, int] = {}
        chosen: dict[int, Holder] = {}

        def rank(holder: Holder) -> tuple[int, Holder]:
            return num_taken.get(holder.process, 0), holder

        for index in sorted(self.holders):
            holder = min(self.holders[index], key=rank)
            num_taken[holder.process] = num_taken.get(holder.process, 0) + 1
            chosen[index] = holder
        return chosen


def find_candidates(
    offers: Sequence[Offer], damaged: Collection[Holder]
) -> Iterator[Candidate]:
    """Yields the snapshots that are newer than the disk, newest first."""
    found: dict[Snapshot, dict[int, list[Holder]]] = {}
    for process, offer in enumerate(offers):
        for place, snapshot in offer.shares:
            holder = Holder(process, place)
            if holder not in damaged:
                shares = found.setdefault(snapshot, {})
                shares.setdefault(place.share, []).append(holder)

    chief = offers[0]
    for snapshot in sorted(found, key=lambda each: each.number, reverse=True):
        # Another checkpoint is newer, or the user has removed checkpoints, to go back.
        # Serial numbers are not unique: the save after a failed save has the same one.
        is_newest = chief.saved_at in (snapshot.complete, snapshot.begun)
        if snapshot.run == chief.run and is_newest:
            yield Candidate(snapshot, found[snapshot])


def find_ring(machines: Sequence[str]) -> list[int]:
    """Returns the processes so that neighbors are on different machines, if possible.

    Each process holds the copy of the process before it.
    """
    ranks: list[int] = []
    for index, machine in enumerate(machines):
        ranks.append(machines[:index].count(machine))
    return sorted(range(len(machines)), key=lambda index: (ranks[index], index))
