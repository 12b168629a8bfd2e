"""Takes snapshots of a run in memory, and finds the newest whole one after a fault.

Training waits while each process copies its parts into a file in memory. A thread then
sums the file, and sends a copy to another process. At a later boundary between two
loops, the processes exchange whether all of this is done. Only then, the previous
snapshot is removed. So a whole snapshot exists at every moment after the first.
"""

import dataclasses
import json
import os
import secrets
import shutil
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from time import monotonic
from typing import Any

import jax
import numpy as np
from etils import epath

from armillary._launcher import SKIPPED, notify_launcher
from armillary._logging import logger
from armillary._records import write_whole
from armillary.checkpoint._content import Content
from armillary.checkpoint._folder import find_checkpoints
from armillary.checkpoint._writer import check_has_joined
from armillary.checkpoint.memory._division import Parts, find_own_parts
from armillary.checkpoint.memory._exchange import Address, ShareServer, connected
from armillary.checkpoint.memory._offer import (
    Candidate,
    Holder,
    Offer,
    find_candidates,
    find_keepers,
    parse_offer,
)
from armillary.checkpoint.memory._room import (
    count_bytes,
    find_machine,
    make_private,
    name_folder,
    remove_all,
    remove_snapshots,
)
from armillary.checkpoint.memory._share import (
    Place,
    Share,
    Snapshot,
    describe_share,
    find_damage,
    find_shares,
    with_checksums,
    write_parts,
)
from armillary.checkpoint.memory._source import SnapshotSource
from armillary.cluster._join import get_peers
from armillary.errors import CheckpointError

_RUN_FILE = "MEMORY"
_WRITING = "writing"
_MEGABYTE = 1e6


class MemoryTier:
    """The snapshots of one directory of checkpoints. All processes call its methods.

    Args:
        directory: The directory of checkpoints.
        memory_directory: A folder in memory.
        interval_seconds: The time between two snapshots.
        read_begun: Returns the time of the last save on the disk that this program has
            begun, in process 0.
    """

    def __init__(
        self,
        directory: epath.Path,
        memory_directory: Path,
        interval_seconds: float,
        read_begun: Callable[[], float],
    ) -> None:
        self._directory = directory
        self._folder = name_folder(memory_directory, str(directory))
        self._interval_seconds = interval_seconds
        self._read_begun = read_begun
        self._peers = get_peers()
        self._server: ShareServer | None = None
        self._offers: list[Offer] = []
        self._number = 0  # The number of the last snapshot.
        self._restored = 0  # The number of the snapshot that was restored, if any.
        self._next_at = 0.0
        # The snapshot that is not known yet as whole, and the thread that completes it.
        self._taken: Snapshot | None = None
        self._thread: threading.Thread | None = None
        self._failure = ""
        self._has_room = False
        self._cost = ""

    def is_due(self) -> bool:
        """Returns whether to take a snapshot now."""
        boundary = self._peers.boundary
        states = boundary.take(self._own_state)
        if states is None:
            states = boundary.exchange("a snapshot in memory", self._own_state)
        problems = [problem for _, problem in states]
        if _WRITING in problems:
            return False
        self._end_snapshot(problems)
        is_due, _ = states[0]
        return is_due

    def take(self, content: Content, step: int | None, saved_step: int | None) -> None:
        """Takes a snapshot; returns once the arrays may change again.

        Call `is_due` or `sync` before.

        Args:
            content: The values.
            step: The step, if it is known.
            saved_step: The step of the last save on the disk.

        Raises:
            CheckpointError: If two snapshots do not fit into the memory.
        """
        if not self._offers:
            self._meet()
        start = monotonic()
        self._next_at = start + self._interval_seconds
        self._number += 1
        with self._peers.announcing_errors():
            # ORDER: the end of a training removes the folder, and no process does so
            # after the exchange that follows.
            make_private(self._folder)
        snapshot = self._agree_on_facts(step, saved_step)
        if snapshot is None:
            return
        with self._peers.announcing_errors():
            parts = find_own_parts(content, self._peers)
        if not self._has_room:
            self._check_room(parts)
            self._has_room = True
            # Snapshots that were not restored would take the room of new ones.
            kept = {self._restored, snapshot.number}
            remove_snapshots(self._folder, lambda number: number not in kept)

        # If there was an exchange, its answer belongs to the snapshot before.
        self._peers.boundary.take(self._own_state)
        index = self._peers.index
        place = Place(index, snapshot.number, index)
        manifest = "" if index else content.as_manifest()
        self._taken = snapshot
        # The program may catch an error of the copy, or Ctrl-C, and continue.
        self._failure = "the values were not copied to the end"
        try:
            file = self._folder / place.data
            placed = write_parts(file, _copy_to_host(parts))
        except OSError as error:
            self._failure = f"{type(error).__name__}: {error}"
            return
        self._failure = ""
        share = Share(snapshot, index, placed, manifest)
        self._cost = self._describe_cost(share, monotonic() - start)
        self._thread = threading.Thread(
            target=self._complete,
            args=(place, share),
            name="armillary-memory",
            daemon=True,
        )
        self._thread.start()

    def sync(self) -> None:
        """Waits until the last snapshot is whole, or has failed."""
        if self._thread is not None:
            self._thread.join()
        topic = "the end of a snapshot in memory"
        self._end_snapshot(self._peers.gather(topic, self._failure))

    def find(self) -> SnapshotSource | None:
        """Returns the newest whole snapshot, if it is newer than the disk."""
        if self._taken is not None:
            self.sync()
        self._meet()
        self._restored = 0
        skipped = self._offers[0].skipped
        damaged: set[Holder] = set()
        while True:
            for candidate in find_candidates(self._offers, damaged):
                name = self._name(candidate.snapshot)
                if name != skipped and self._is_whole(candidate):
                    break
            else:
                return None
            holders = candidate.spread()
            problems = self._verify(holders)
            if not problems:
                break
            damaged |= problems.keys()
            self._warn(*problems.values())

        addresses: dict[int, Address] = {}
        for index, offer in enumerate(self._offers):
            if offer.address is not None:
                addresses[index] = offer.address
        self._next_at = monotonic() + self._interval_seconds
        self._restored = candidate.snapshot.number
        snapshot = candidate.snapshot
        is_saved = self._offers[0].saved_at == snapshot.begun
        return SnapshotSource(
            name,
            snapshot,
            self._folder,
            holders,
            addresses,
            # A save that had begun, and was lost, is due again.
            saved_step=snapshot.saved_step if is_saved else None,
        )

    def has_lost_restored(self) -> bool:
        """Returns whether the snapshot that `find` returned no longer exists."""
        pattern = f"process_*/snapshot_{self._restored}/share_*.json"
        return self._restored > 0 and not any(self._folder.glob(pattern))

    def drop(self) -> None:
        """Removes the snapshots, because the disk has newer values."""
        if not self._offers:
            return
        # Another process may still send its copy.
        self.sync()
        # Also the snapshots of processes that an earlier job had.
        remove_all(self._folder)

    def _own_state(self) -> list[Any]:
        is_writing = self._thread is not None and self._thread.is_alive()
        # Only the clock of process 0 counts. So most states are equal, and an exchange
        # of equal values costs less.
        is_due = self._peers.index == 0 and monotonic() >= self._next_at
        return [is_due, _WRITING if is_writing else self._failure]

    def _end_snapshot(self, problems: Sequence[str]) -> None:
        """Ends the last snapshot, which each process has written or has not."""
        taken = self._taken
        self._taken = None
        self._thread = None
        self._failure = ""
        if taken is None:
            return
        failed = [
            f"in process {index}, {problem}"
            for index, problem in enumerate(problems)
            if problem
        ]
        if failed:
            remove_snapshots(self._folder, lambda number: number == taken.number)
            self._warn_of_none(taken.step, "; ".join(failed))
            return
        remove_snapshots(self._folder, lambda number: number < taken.number)
        if self._peers.index == 0 and taken.step is not None:
            notify_launcher("saved", taken.step, self._name(taken))
        self._log_cost()

    def _meet(self) -> None:
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
        for offer in self._offers:
            for place, _ in offer.shares:
                self._number = max(self._number, place.number)

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
            saved_at=self._read_complete(),
            skipped=os.environ.get(SKIPPED, ""),
        )

    def _identify_run(self) -> str:
        """Returns the content of a file in the directory, if it has one.

        A directory that was removed and made again has another one, so the snapshots of
        its earlier life do not count.
        """
        file = self._directory / _RUN_FILE
        return file.read_text() if file.exists() else ""

    def _make_run(self) -> str:
        """Returns the identity of the directory, which only a training job makes."""
        run = self._identify_run()
        if run:
            return run
        self._directory.mkdir(parents=True, exist_ok=True)
        run = secrets.token_hex(8)
        file = self._directory / _RUN_FILE
        write_whole(file, run.encode(), f".{_RUN_FILE}.{os.getpid()}")
        return run

    def _read_complete(self) -> float:
        """Returns the time of the newest complete checkpoint on the disk."""
        saved = find_checkpoints(self._directory)
        return saved[-1].saved_at if saved else 0.0

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

    def _agree_on_facts(
        self, step: int | None, saved_step: int | None
    ) -> Snapshot | None:
        """Returns the facts about the next snapshot, as process 0 knows them.

        It returns `None`, after a warning, if the disk does not answer.
        """
        own: dict[str, Any] | None = None
        if self._peers.index == 0:
            try:
                own = dataclasses.asdict(self._find_facts(step, saved_step))
            except OSError as error:
                self._warn_of_none(step, f"{type(error).__name__}: {error}")
        topic = "a new snapshot in memory"
        first, *_ = self._peers.gather(topic, json.dumps(own))
        facts = json.loads(first)
        return None if facts is None else Snapshot(**facts)

    def _find_facts(self, step: int | None, saved_step: int | None) -> Snapshot:
        complete = self._read_complete()
        return Snapshot(
            run=self._make_run(),
            token=secrets.token_hex(4),
            number=self._number,
            count=self._peers.count,
            step=step,
            complete=complete,
            begun=max(complete, self._read_begun()),
            saved_step=saved_step,
        )

    def _check_room(self, parts: Parts) -> None:
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
                f"two snapshots take {own / _MEGABYTE:,.0f} MB there, but it has "
                f"{free / _MEGABYTE:,.0f} MB free"
            )
        for text in self._peers.gather("the room for snapshots", problem):
            if text:
                raise CheckpointError(
                    f"`memory_directory` is `{self._folder.parent}`: {text}. Give it "
                    "more memory (for a container, `--shm-size`), use another folder "
                    "in memory, or leave `memory_interval_seconds` out."
                )

    def _complete(self, place: Place, share: Share) -> None:
        """Completes the share of this process, and sends a copy of it."""
        try:
            file = self._folder / place.data
            parts = with_checksums(file, share.parts)
            describe_share(file.parent, dataclasses.replace(share, parts=parts))
            if self._peers.is_alone:
                return
            address = self._find_keeper().address
            assert address is not None  # or this process would be alone
            with connected(address) as connection:
                connection.copy(self._folder, place)
        except Exception as error:
            self._failure = f"{type(error).__name__}: {error}"

    def _find_keeper(self) -> Offer:
        """Returns the offer of the process that keeps the copy of the own share."""
        keepers = find_keepers([offer.machine for offer in self._offers])
        return self._offers[keepers[self._peers.index]]

    def _describe_cost(self, share: Share, waited: float) -> str:
        size = share.num_bytes / _MEGABYTE
        copy = "" if self._peers.is_alone else ", and a copy at another process"
        return (
            f"Keeps the state in memory every {self._interval_seconds:g} s: "
            f"{size:,.1f} MB in `{self._folder}`{copy}, for each of two snapshots. "
            f"Training waited {waited:.2g} s for the first one."
        )

    def _log_cost(self) -> None:
        if self._peers.index == 0 and not self._has_logged:
            logger.info("%s", self._cost)
        self._has_logged = True

    _has_logged = False

    def _warn_of_none(self, step: int | None, why: str) -> None:
        self._warn(
            f"No snapshot was taken in memory at step {step}: {why}. Training "
            f"continues, and the next snapshot is due in {self._interval_seconds:g} s."
        )

    def _warn(self, *texts: str) -> None:
        for text in texts if self._peers.index == 0 else ():
            logger.warning("%s", text)

    def _name(self, snapshot: Snapshot) -> str:
        """Returns the name of a snapshot, which is the same in all processes."""
        return f"{self._offers[0].folder}/snapshot_{snapshot.number}"


def _copy_to_host(parts: Parts) -> dict[Any, np.ndarray]:
    for part in parts.values():
        if isinstance(part, jax.Array):
            part.copy_to_host_async()
    return {key: np.asarray(part) for key, part in parts.items()}
