"""The shares that each process has in memory, and the choice of a whole snapshot.

All processes exchange their offers, and then find the same answers.
"""

import dataclasses
import json
from collections import Counter
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
    shares: list[tuple[Place, Snapshot]] = []
    for place, facts in fields.pop("shares"):
        shares.append((Place(*place), Snapshot(**facts)))

    parts = fields.pop("address")
    address = None if parts is None else Address(*parts)
    return Offer(address=address, shares=shares, **fields)


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
            chosen[index] = holder
            num_before, _ = rank(holder)
            num_taken[holder.process] = num_before + 1
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
    for snapshot in sorted(found, key=lambda snapshot: snapshot.number, reverse=True):
        # Another checkpoint is newer, or the user has removed checkpoints, to go back.
        # Serial numbers are not unique: the save after a failed save has the same one.
        is_newest = chief.saved_at in (snapshot.complete, snapshot.begun)
        if snapshot.run == chief.run and is_newest:
            yield Candidate(snapshot, found[snapshot])


def find_keepers(machines: Sequence[str]) -> list[int]:
    """Returns for each process the process that keeps a copy of its share.

    Each process keeps one copy. It is of a process on another machine, unless more than
    half of the processes are on one machine.
    """
    count = len(machines)
    by_machine = sorted(range(count), key=lambda index: (machines[index], index))
    largest = max(Counter(machines).values())
    # Processes of one machine are neighbors, so none of them is this far away.
    distance = largest if largest < count else 1
    keepers = [0] * count
    for place, index in enumerate(by_machine):
        keepers[index] = by_machine[(place + distance) % count]
    return keepers
