"""Saving and restoring where several processes train together.

Process 0 alone writes, and chooses paths. Of mirrored state it has all; arrays that are
divided between processes travel to it, one after the other. The others learn what it
did. Where it fails with a `CheckpointError`, all raise that error; nobody is left
waiting, and a program that handles it can go on. All see one directory.

Each process judges whether a checkpoint is good, because each reads it: a cache or a
disk may show one of them something else. What one refuses, nobody restores: processes
that restored different ones would train a mixture.
"""

import contextlib
import dataclasses
import hashlib
import json
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, TypeVar

from etils import epath

from armillary.checkpoint._checksums import CHECKSUM_FILE, find_damage
from armillary.checkpoint._folder import Header, find_checkpoints, read_header
from armillary.checkpoint._leaf import Content, as_stored_by_one
from armillary.checkpoint._writer import Writer
from armillary.cluster._join import get_peers
from armillary.cluster._peers import Peers
from armillary.errors import CheckpointError

T = TypeVar("T")


def announcing_errors() -> contextlib.AbstractContextManager[None]:
    """Returns a context whose errors the other processes, if any, hear of."""
    peers = get_peers()
    return contextlib.nullcontext() if peers is None else peers.announcing_errors()


def decide(topic: str, function: Callable[[], T], peers: Peers | None) -> T:
    """Returns on every process what `function` returns on process 0.

    All processes must call it, and it must return what JSON can hold.
    """
    if peers is None:
        return function()
    value = problem = None
    if peers.index == 0:
        with peers.announcing_errors():
            try:
                value = function()
            except CheckpointError as error:
                problem = error
    said = [value, None if problem is None else str(problem)]
    value, text = json.loads(peers.gather(topic, json.dumps(said))[0])
    if text is not None:
        raise problem or CheckpointError(text)
    return value


def merge_refusals(refused: dict[str, str], peers: Peers | None) -> dict[str, str]:
    """Returns what any process says, by name. All processes must call it."""
    if peers is None:
        return refused
    said = peers.gather("states that do not fit", json.dumps(refused))
    return {name: text for each in said for name, text in json.loads(each).items()}


def verify(
    chosen: epath.Path | None, directory: epath.Path, peers: Peers | None
) -> str | None:
    """Returns what is damaged of a checkpoint, for any process, or `None`.

    Each process reads all of its files, as it is going to when it restores it. Raises,
    in all processes, if they do not see the same one.
    """
    if peers is None:
        return None if chosen is None else find_damage(chosen)
    with peers.announcing_errors():
        own = _look(chosen, directory)
    said = peers.gather("the checkpoint to restore", json.dumps([*own, str(directory)]))
    found = [json.loads(text) for text in said]
    if len({text for text, is_damaged, _ in found if not is_damaged}) > 1:
        shown = "\n".join(
            f"  process {index} of {peers.count}: {text}, in {place}"
            for index, (text, _, place) in enumerate(found)
        )
        raise CheckpointError(
            "The processes do not see the same checkpoint to restore:\n"
            f"{shown}\n"
            "Give `CheckpointManager` a directory that all of them see, such as one of "
            "a shared file system. Nothing was restored."
        )
    damages = {i: text for i, (text, is_damaged, _) in enumerate(found) if is_damaged}
    if len(damages) == peers.count and len(set(damages.values())) == 1:
        return damages[0]
    return (
        "; ".join(
            f"in process {index} of {peers.count}, {damage}"
            for index, damage in damages.items()
        )
        or None
    )


def _look(chosen: epath.Path | None, directory: epath.Path) -> tuple[str, bool]:
    """Returns what this process sees of a checkpoint, and whether that is damage."""
    if chosen is None:
        saved = find_checkpoints(directory)
        newest = saved[-1] if saved else None
        return (_describe(newest.path, newest.header) if newest else "nothing"), False
    if not chosen.exists():
        return "nothing", False
    damage = find_damage(chosen)
    if damage is not None:
        return damage, True
    header = read_header(chosen)
    if header is None:
        return "nothing", False
    # All files are as they are listed there: the same list means the same content.
    sums = hashlib.sha256((chosen / CHECKSUM_FILE).read_bytes()).hexdigest()[:12]
    return f"{_describe(chosen, header)} (`{CHECKSUM_FILE}` #{sums})", False


def _describe(path: epath.Path, header: Header) -> str:
    time = datetime.fromtimestamp(header.saved_at, UTC)
    return f"{path.name} of {time:%Y-%m-%d %H:%M:%S.%f}"


def make_writer(directory: epath.Path, **options: Any) -> "Writer | JointWriter":
    """Returns what writes the checkpoints of a directory, alone or with others."""
    writer, peers = Writer(directory, **options), get_peers()
    return writer if peers is None else JointWriter(writer, peers)


class JointWriter:
    """Lets process 0 write, and all know of it. All call the same methods."""

    has_failed = False
    """Nobody knows of a failure before `sync`, in which all learn of it together."""

    def __init__(self, writer: Writer, peers: Peers) -> None:
        self._writer = writer
        self._peers = peers
        self._is_saving = False
        self.last_error: CheckpointError | None = None
        """The error of the last save, or `None`; the same in all processes."""

    def start(self, number: int, content: Content) -> str | None:
        """Starts a save and returns the path it is going to have, as `Writer` does."""
        is_writer = self._peers.index == 0
        # On all processes: computations on shared arrays must be made by all.
        stored = {
            name: as_stored_by_one(leaf, is_writer=is_writer)
            for name, leaf in content.leaves.items()
        }
        content = dataclasses.replace(content, stored=stored)
        path = self._share("a save", lambda: self._writer.start(number, content))
        self._is_saving = True
        return path

    def sync(self) -> None:
        """Waits until the last save is complete and old checkpoints are removed."""
        if not self._is_saving:
            return
        self._is_saving = False
        if not self._peers.has_failed:
            self._share("the end of a save", self._writer.sync)
        elif self._peers.index == 0:
            # Nobody answers any more, but what was started can still be completed.
            self._writer.sync()

    def close(self) -> None:
        """Waits like `sync`, and ends the threads that write."""
        try:
            self.sync()
        finally:
            self._writer.close()

    def _share(self, topic: str, function: Callable[[], T]) -> T:
        """Calls `function` in process 0 and returns what it did there."""

        def call() -> tuple[T, str | None]:
            value, noted = function(), self._writer.last_error
            return value, None if noted is None else str(noted)

        try:
            value, logged = decide(topic, call, self._peers)
        except CheckpointError as error:
            self.last_error = error
            raise
        self.last_error = None if logged is None else CheckpointError(logged)
        return value
