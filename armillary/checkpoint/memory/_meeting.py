"""The snapshots that the processes of a job have, and their agreement on one of them.

Each process looks into its own folder, and all exchange what they find. Then all of
them make the same choices.
"""

import dataclasses
import json
import os
import secrets
import shutil
from collections.abc import Mapping
from pathlib import Path

from etils import epath

from armillary._launcher import SKIPPED
from armillary._logging import logger
from armillary._records import write_whole
from armillary.checkpoint._folder import find_checkpoints
from armillary.checkpoint._writer import check_has_joined
from armillary.checkpoint.memory._division import Parts
from armillary.checkpoint.memory._exchange import Address, ShareServer
from armillary.checkpoint.memory._offer import (
    Candidate,
    Holder,
    Offer,
    find_candidates,
    find_keepers,
    parse_offer,
)
from armillary.checkpoint.memory._run_folder import (
    count_bytes,
    find_machine,
    make_private,
)
from armillary.checkpoint.memory._share import Snapshot, find_damage, find_shares
from armillary.cluster._peers import Peers
from armillary.errors import CheckpointError

_RUN_FILE = "MEMORY"
MEGABYTE = 1e6


class Meeting:
    """The offers of all processes, which all of them have exchanged.

    Args:
        directory: The directory of checkpoints.
        folder: The folder in memory for this directory.
        peers: The processes.
    """

    def __init__(self, directory: epath.Path, folder: Path, peers: Peers) -> None:
        self._directory = directory
        self._folder = folder
        self._peers = peers
        self._server: ShareServer | None = None
        self._offers: list[Offer] = []

    @property
    def is_held(self) -> bool:
        """True if the processes have met."""
        return bool(self._offers)

    @property
    def is_open(self) -> bool:
        """True if the processes have met, and each of them serves the others."""
        return self.is_held and (self._peers.is_alone or self._server is not None)

    @property
    def newest_number(self) -> int:
        """The highest number of a snapshot that any process has."""
        numbers = [place.number for offer in self._offers for place, _ in offer.shares]
        return max(numbers, default=0)

    @property
    def disk_time(self) -> float:
        """The time of the newest complete checkpoint on the disk, for process 0."""
        return self._offers[0].saved_at

    @property
    def addresses(self) -> dict[int, Address]:
        """The servers of the processes."""
        found: dict[int, Address] = {}
        for index, offer in enumerate(self._offers):
            if offer.address is not None:
                found[index] = offer.address
        return found

    def hold(self) -> None:
        """Exchanges the offers of all processes."""
        check_has_joined(self._peers)
        with self._peers.announcing_errors():
            make_private(self._folder)
            if self._server is None and not self._peers.is_alone:
                host = self._peers.host
                self._server = ShareServer(self._folder, host, self._peers.index)
            own = self._make_offer()
        texts = self._peers.gather("the snapshots in memory", own.as_text())
        self._offers = [parse_offer(text) for text in texts]

    def close(self) -> None:
        """Ends the server of this process. The processes can meet again."""
        if self._server is not None:
            self._server.close()
            self._server = None

    def _make_offer(self) -> Offer:
        found = find_shares(self._folder)
        own = Offer(
            machine=f"{find_machine()} {os.stat(self._folder).st_dev}",
            address=None if self._server is None else self._server.address,
            free_bytes=shutil.disk_usage(self._folder).free,
            shares=[(place, share.snapshot) for place, share in found.items()],
        )
        if self._peers.index:
            return own
        return dataclasses.replace(
            own,
            folder=str(self._folder),
            run=self._identify_run(),
            saved_at=self.read_complete(),
            skipped=os.environ.get(SKIPPED, ""),
        )

    def _identify_run(self) -> str:
        """Returns the content of a file in the directory, if it has one.

        A directory that was removed and made again has another one, so the snapshots of
        its earlier life do not count.
        """
        file = self._directory / _RUN_FILE
        return file.read_text() if file.exists() else ""

    def make_run(self) -> str:
        """Returns the identity of the directory, which only a training job makes."""
        run = self._identify_run()
        if run:
            return run
        self._directory.mkdir(parents=True, exist_ok=True)
        run = secrets.token_hex(8)
        file = self._directory / _RUN_FILE
        write_whole(file, run.encode(), f".{_RUN_FILE}.{os.getpid()}")
        return run

    def read_complete(self) -> float:
        """Returns the time of the newest complete checkpoint on the disk."""
        saved = find_checkpoints(self._directory)
        return saved[-1].saved_at if saved else 0.0

    def find_whole(self) -> tuple[Snapshot, dict[int, Holder]] | None:
        """Returns the newest whole snapshot that is newer than the disk, verified.

        Returns:
            The snapshot and a holder of each share, or `None`.
        """
        damaged: set[Holder] = set()
        while True:
            candidate = self._choose(damaged)
            if candidate is None:
                return None
            holders = candidate.spread()
            problems = self._verify(holders)
            if not problems:
                return candidate.snapshot, holders
            damaged |= problems.keys()
            for problem in problems.values():
                self._warn(problem)

    def _choose(self, damaged: set[Holder]) -> Candidate | None:
        skipped = self._offers[0].skipped
        for candidate in find_candidates(self._offers, damaged):
            is_skipped = self.name(candidate.snapshot) == skipped
            if not is_skipped and self._is_whole(candidate):
                return candidate
        return None

    def _is_whole(self, candidate: Candidate) -> bool:
        num_missing = candidate.num_missing
        if num_missing:
            self._warn(
                f"The snapshot of step {candidate.snapshot.step} in memory lacks "
                f"{num_missing} of {candidate.snapshot.count} shares, so it is not "
                "used."
            )
        return not num_missing

    def _verify(self, holders: Mapping[int, Holder]) -> dict[Holder, str]:
        """Returns the damage of shares. Each share is verified by its holder."""
        found = find_shares(self._folder)
        own: dict[str, str] = {}
        for index, holder in holders.items():
            if holder.process != self._peers.index:
                continue
            file = self._folder / holder.place.data
            share = found.get(holder.place)
            problem = f"`{file}` is gone"
            if share is not None:
                problem = find_damage(file, share.parts)
            if problem is not None:
                own[str(index)] = problem

        problems: dict[Holder, str] = {}
        for text in self._peers.gather("damage in memory", json.dumps(own)):
            for index, problem in json.loads(text).items():
                problems[holders[int(index)]] = problem
        return problems

    def check_room(self, parts: Parts) -> None:
        """Raises if two snapshots do not fit, in all processes."""
        own_bytes = sum(part.nbytes for part in parts.values())
        texts = self._peers.gather("the sizes of shares", str(own_bytes))
        sizes = [int(text) for text in texts]
        machines = [offer.machine for offer in self._offers]
        needed = dict.fromkeys(machines, 0)
        for index, keeper in enumerate(find_keepers(machines)):
            needed[machines[index]] += 2 * sizes[index]
            if not self._peers.is_alone:
                needed[machines[keeper]] += 2 * sizes[index]

        # Older snapshots make room for new ones.
        free = self._offers[self._peers.index].free_bytes + count_bytes(self._folder)
        own = needed[machines[self._peers.index]]
        problem = ""
        if own > free:
            problem = (
                f"two snapshots take {own / MEGABYTE:,.0f} MB there, but it has "
                f"{free / MEGABYTE:,.0f} MB free"
            )
        for text in self._peers.gather("the room for snapshots", problem):
            if text:
                raise CheckpointError(
                    f"`memory_directory` is `{self._folder.parent}`: {text}. Give it "
                    "more memory (for a container, `--shm-size`), use another folder "
                    "in memory, or leave `memory_interval_seconds` out."
                )

    def find_keeper(self) -> Address | None:
        """Returns the process that keeps the copy of the own share, if there is one."""
        keepers = find_keepers([offer.machine for offer in self._offers])
        return self._offers[keepers[self._peers.index]].address

    def name(self, snapshot: Snapshot) -> str:
        """Returns the name of a snapshot, which is the same in all processes."""
        return f"{self._offers[0].folder}/snapshot_{snapshot.number}"

    def _warn(self, text: str) -> None:
        if self._peers.index == 0:
            logger.warning("%s", text)
