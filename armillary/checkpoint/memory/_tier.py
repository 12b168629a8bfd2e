"""Takes snapshots of a run in memory, and finds the newest whole one after a fault.

Training waits while each process copies its parts into a file in memory. A thread then
sums the file, and sends a copy to another process. At a later boundary between two
loops, the processes exchange whether all of this is done. Only then, the previous
snapshot is removed. So a whole snapshot exists at every moment after the first.
"""

import dataclasses
import json
import secrets
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from time import monotonic
from typing import Any

import jax
import numpy as np
from etils import epath

from armillary._launcher import notify_launcher
from armillary._logging import logger
from armillary.checkpoint._content import Content
from armillary.checkpoint.memory._division import Parts, find_own_parts
from armillary.checkpoint.memory._exchange import connected
from armillary.checkpoint.memory._meeting import MEGABYTE, Meeting
from armillary.checkpoint.memory._run_folder import (
    make_private,
    name_folder,
    remove_all,
    remove_snapshots,
)
from armillary.checkpoint.memory._share import (
    Part,
    Place,
    Share,
    Snapshot,
    describe_share,
    explain,
    with_checksums,
    write_parts,
)
from armillary.checkpoint.memory._source import SnapshotSource
from armillary.cluster._join import get_peers
from armillary.goodput._stopwatch import Category
from armillary.lifeline._transfer import Transfer

_WRITING = "writing"


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
        self._folder = name_folder(memory_directory, str(directory))
        self._interval_seconds = interval_seconds
        self._read_begun = read_begun
        self._peers = get_peers()
        self._meeting = Meeting(directory, self._folder, self._peers)
        self._number = 0  # The number of the last snapshot.
        self._restored = 0  # The number of the snapshot that was restored, if any.
        self._next_at = 0.0
        # The snapshot that is not known yet as whole, and the thread that completes it.
        self._taken: Snapshot | None = None
        self._thread: threading.Thread | None = None
        self._failure = ""
        self._has_room = False
        self._cost = ""
        self._has_logged = False

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
        if not self._meeting.is_open:
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
            self._meeting.check_room(parts)
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
            placed = self._write(self._folder / place.data, parts)
        except OSError as error:
            self._failure = explain(error)
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
        found = self._meeting.find_whole()
        if found is None:
            return None
        snapshot, holders = found
        self._next_at = monotonic() + self._interval_seconds
        self._restored = snapshot.number
        is_saved = self._meeting.disk_time == snapshot.begun
        return SnapshotSource(
            self._meeting.name(snapshot),
            snapshot,
            self._folder,
            holders,
            self._meeting.addresses,
            # A save that had begun, and was lost, is due again.
            saved_step=snapshot.saved_step if is_saved else None,
        )

    def has_lost_restored(self) -> bool:
        """Returns whether the snapshot that `find` returned no longer exists."""
        pattern = f"process_*/snapshot_{self._restored}/share_*.json"
        return self._restored > 0 and not any(self._folder.glob(pattern))

    def drop(self) -> None:
        """Removes the snapshots, because the disk has newer values."""
        if not self._meeting.is_held:
            return
        # Another process may still send its copy.
        self.sync()
        # Also the snapshots of processes that an earlier job had.
        remove_all(self._folder)

    def close(self) -> None:
        """Waits like `sync`, and ends the server of this process."""
        if not self._meeting.is_open:
            return
        try:
            if not self._peers.has_failed:
                # Another process may still send its copy, or read from this one.
                self.sync()
        finally:
            self._meeting.close()

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
            notify_launcher("saved", taken.step, self._meeting.name(taken))
        self._log_cost()

    def _meet(self) -> None:
        self._meeting.hold()
        self._number = max(self._number, self._meeting.newest_number)

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
                self._warn_of_none(step, explain(error))
        topic = "a new snapshot in memory"
        first, *_ = self._peers.gather(topic, json.dumps(own))
        facts = json.loads(first)
        return None if facts is None else Snapshot(**facts)

    def _find_facts(self, step: int | None, saved_step: int | None) -> Snapshot:
        complete = self._meeting.read_complete()
        return Snapshot(
            run=self._meeting.make_run(),
            token=secrets.token_hex(4),
            number=self._number,
            count=self._peers.count,
            step=step,
            complete=complete,
            begun=max(complete, self._read_begun()),
            saved_step=saved_step,
        )

    def _write(self, file: Path, parts: Parts) -> tuple[Part, ...]:
        total = sum(part.nbytes for part in parts.values())
        transfer = Transfer(Category.SAVING, "copied to memory", total)
        with transfer.reported():
            return write_parts(file, _copy_to_host(parts), transfer.add)

    def _complete(self, place: Place, share: Share) -> None:
        """Completes the share of this process, and sends a copy of it."""
        try:
            file = self._folder / place.data
            parts = with_checksums(file, share.parts)
            describe_share(file.parent, dataclasses.replace(share, parts=parts))
            address = self._meeting.find_keeper()
            if address is None:
                return
            transfer = Transfer(Category.SAVING, "sent", share.num_bytes)
            with connected(address) as connection, transfer.reported():
                connection.copy(self._folder, place, transfer.add)
        except Exception as error:
            self._failure = explain(error)

    def _describe_cost(self, share: Share, waited: float) -> str:
        size = share.num_bytes / MEGABYTE
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

    def _warn_of_none(self, step: int | None, why: str) -> None:
        if self._peers.index == 0:
            logger.warning(
                f"No snapshot was taken in memory at step {step}: {why}. Training "
                "continues, and the next snapshot is due in "
                f"{self._interval_seconds:g} s."
            )


def _copy_to_host(parts: Parts) -> dict[Any, np.ndarray]:
    for part in parts.values():
        if isinstance(part, jax.Array):
            part.copy_to_host_async()
    return {key: np.asarray(part) for key, part in parts.items()}
