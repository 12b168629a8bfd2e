"""Saving and restoring where several processes train together.

State is mirrored, so process 0 has all of it, and writes it. The others take part in
what must be decided once (such as the path) and learn how it ended; they never write.
All see one directory.
"""

import contextlib
import json
from collections.abc import Iterator
from typing import Any

from etils import epath

from armillary.checkpoint._checkpoint import Content
from armillary.checkpoint._writer import Writer
from armillary.cluster._join import get_peers
from armillary.cluster._peers import Peers
from armillary.distribute import as_local
from armillary.errors import CheckpointError


def make_writer(directory: epath.Path, **options: Any) -> "Writer | JointWriter":
    """Returns what writes the checkpoints of a directory, alone or with others."""
    writer, peers = Writer(directory, **options), get_peers()
    return writer if peers is None else JointWriter(writer, peers)


def check_same_path(path: str | None, peers: Peers | None) -> None:
    """Raises, in all processes, if they have not restored the same checkpoint.

    Args:
        path: What this process has restored, or `None`.
        peers: The processes, or `None` if there is one.

    Raises:
        CheckpointError: If they differ.
    """
    if peers is None:
        return
    paths = peers.gather("the latest checkpoint", path or "no checkpoint")
    if len(set(paths)) > 1:
        shown = "\n".join(
            f"  process {index} of {peers.count}: {path}"
            for index, path in enumerate(paths)
        )
        raise CheckpointError(
            f"The processes have restored different checkpoints:\n{shown}\n"
            "Give `CheckpointManager` a directory that all of them see, such as one of "
            "a shared file system."
        )


@contextlib.contextmanager
def told() -> Iterator[None]:
    """Tells the other processes, if there are any, of an error in the code under it."""
    peers = get_peers()
    with contextlib.nullcontext() if peers is None else peers.told():
        yield


class JointWriter:
    """Lets process 0 write, and all know of it. All call the same methods.

    Args:
        writer: Writes, in process 0.
        peers: The processes.
    """

    def __init__(self, writer: Writer, peers: Peers) -> None:
        self._writer = writer
        self._peers = peers
        self._is_chief = peers.index == 0
        self._is_saving = False
        self.last_error: CheckpointError | None = None
        """What kept the last save from being written, or `None`; alike in all."""

    @property
    def has_failed(self) -> bool:
        """Returns that nothing is known before `sync`: all must learn it together."""
        return False

    def start(self, number: int, content: Content) -> str | None:
        """Starts a save and returns the path it is going to have, as `Writer` does.

        Raises:
            CheckpointError: If it cannot be written, or the last save could not be.
        """
        self.sync()
        path = error = None
        # On all processes: computations on shared arrays must be made by all.
        leaves = {name: as_local(leaf) for name, leaf in content.leaves.items()}
        if self._is_chief:
            try:
                path = self._writer.start(number, Content(leaves, content.states))
            except CheckpointError as caught:
                error = caught
        self._share("the start of a save", error)
        self._is_saving = True
        (path, *_) = self._peers.gather("the path of a save", path or "")
        return path or None

    def sync(self) -> None:
        """Waits until the last save is complete and old checkpoints are removed.

        Raises:
            CheckpointError: If that save failed. It is raised once, in all processes.
        """
        if not self._is_saving:
            return
        self._is_saving = False
        error = None
        if self._is_chief:
            try:
                self._writer.sync()
            except CheckpointError as caught:
                error = caught
        self._share("the end of a save", error)

    def close(self) -> None:
        """Waits like `sync`, and ends the threads that write."""
        try:
            self.sync()
        finally:
            self._writer.close()

    def _share(self, topic: str, error: CheckpointError | None) -> None:
        """Raises in all processes what was raised in process 0.

        Raises:
            CheckpointError: If there is an error.
        """
        if error is None and self._peers.has_failed:
            return  # Nobody answers any more, and what was written is complete.
        noted = self._writer.last_error
        problems = [
            None if problem is None else str(problem) for problem in (error, noted)
        ]
        (told, *_) = self._peers.gather(topic, json.dumps(problems))
        raised, logged = json.loads(told)
        self.last_error = None if logged is None else noted or CheckpointError(logged)
        if error is not None:
            raise error
        if raised is not None:
            raise CheckpointError(f"{raised} (Process 0 could not write it.)")
