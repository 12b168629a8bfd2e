"""Tests of the state of a checkpoint directory after a simulated power cut.

A recorder looks at all files after each sync, rename, creation and removal by Python.
So it knows which files were synced at each moment. A simulated cut keeps synced data.
Everything else may be lost in part and in any order: changes of a folder may be
missing, and files may be empty, torn, zeros or whole. Syncs of TensorStore happen in
C++, so the recorder counts them as missing. Disks that lose synced data are not
simulated.
"""

import os
import random
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import pytest
from etils import epath

from armillary.checkpoint import Checkpoint, CheckpointManager
from armillary.checkpoint._checksums import find_damage
from armillary.checkpoint._folder import find_checkpoints

NUM_CUTS = 1000
Image = tuple[tuple[str, bytes | None], ...]
"""Paths and contents of files, `None` for folders."""


class Moment(NamedTuple):
    """The certain and the possible content of a disk, by the number of the inode.

    `changes` of a folder are those since it was synced; what one of them does, it does
    at once: a new name, a removed one, or both for a file that is renamed.
    """

    names: dict[int, dict[str, int]]
    changes: dict[int, list[dict[str, int | None]]]
    synced: dict[int, bytes]
    written: dict[int, bytes]
    num_kept: int


class Recorder:
    """Records the moments of what is done below an empty folder."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.moments: list[Moment] = []
        self.num_kept = 0
        self._lock = threading.RLock()
        # Open files keep their inodes from being used again.
        self._held: dict[int, int] = {}
        self._now: dict[int, dict[str, int]] = {}
        self._synced_names: dict[int, dict[str, int]] = {self._hold(root): {}}
        self._changes: dict[int, list[dict[str, int | None]]] = {}
        self._synced: dict[int, bytes] = {}
        self._written: dict[int, bytes] = {}

    def patch(self, patch: pytest.MonkeyPatch) -> None:
        removing = ("rename", "replace", "unlink", "remove", "rmdir")
        for name in ("fsync", "mkdir", *removing):
            patch.setattr(os, name, self._recording(getattr(os, name)))

    def _recording(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def call_and_look(*args: Any, **kwargs: Any) -> Any:
            with self._lock:
                self._look()
                result = call(*args, **kwargs)
                if call.__name__ == "fsync":
                    self._note_synced(os.fstat(args[0]).st_ino)
                self._look()
                return result

        return call_and_look

    def close(self) -> None:
        for descriptor in self._held.values():
            os.close(descriptor)

    def _hold(self, path: Path) -> int:
        inode = path.stat().st_ino
        if inode not in self._held:
            self._held[inode] = os.open(path, os.O_RDONLY)
        return inode

    def _note_synced(self, inode: int) -> None:
        if inode in self._now:
            self._synced_names[inode] = self._now[inode]
            self._changes[inode] = []
        elif inode in self._written:
            self._synced[inode] = self._written[inode]

    def _look(self) -> None:
        self._look_into(self.root)
        self.moments.append(
            Moment(
                dict(self._synced_names),
                {inode: list(changes) for inode, changes in self._changes.items()},
                dict(self._synced),
                dict(self._written),
                self.num_kept,
            )
        )

    def _look_into(self, folder: Path) -> None:
        before, now = self._now.get(self._hold(folder), {}), {}
        for path in sorted(folder.iterdir()):
            try:
                now[path.name] = self._hold(path)
                if path.is_dir():
                    self._look_into(path)
                else:
                    self._written[now[path.name]] = path.read_bytes()
            except FileNotFoundError:  # TensorStore renames files meanwhile.
                now.pop(path.name, None)
        inode = self._hold(folder)
        self._now[inode] = now
        gone = {name: node for name, node in before.items() if name not in now}
        changes = self._changes.setdefault(inode, [])
        for name, node in now.items():
            if before.get(name) != node:
                old = {key: None for key, value in gone.items() if value == node}
                changes.append({**old, name: node})
        moved = {name for change in changes for name in change}
        changes += [{name: None} for name in gone if name not in moved]


def cut(moment: Moment, root: int, chance: random.Random) -> Image:
    """Returns what may be there after a power cut."""
    all_or_nothing = chance.choice([0.0, 0.5, 0.5, 1.0])
    image: dict[str, bytes | None] = {}

    def add(inode: int, path: str) -> None:
        if inode in moment.written:
            image[path] = tear(
                moment.written[inode], moment.synced.get(inode), chance, all_or_nothing
            )
            return
        image[path] = None
        if "-tmp" in path or path.endswith("-removed"):
            return  # Nothing looks into it.
        names: dict[str, int | None] = {**moment.names.get(inode, {})}
        for change in moment.changes.get(inode, ()):
            if chance.random() < all_or_nothing:
                names |= change
        for name, node in names.items():
            if node is not None:
                add(node, f"{path}/{name}")

    add(root, ".")
    return tuple(sorted(image.items()))


def tear(
    written: bytes, synced: bytes | None, chance: random.Random, all_or_nothing: float
) -> bytes:
    """Returns what may be left of a file."""
    if synced == written or all_or_nothing == 1:
        return written
    if all_or_nothing == 0:
        return synced or b""
    half = len(written) // 2
    return chance.choice(
        [synced or b"", written, written[:half], written[:half] + bytes(half)]
    )


def make(run: SimpleNamespace, directory: Path) -> CheckpointManager:
    return CheckpointManager(Checkpoint(run=run), directory, max_to_keep=1)


def make_run(value: int) -> SimpleNamespace:
    return SimpleNamespace(w=jnp.full((3, 5), float(value)), b=jnp.full(2, -value))


def find_newest(directory: Path) -> int:
    """Returns the serial number of the newest checkpoint, which must be whole."""
    saved = find_checkpoints(epath.Path(directory))
    if not saved:
        return 0
    assert find_damage(saved[-1].path) is None
    return saved[-1].serial


def test_no_cut_at_any_moment_loses_a_checkpoint(tmp_path, monkeypatch):
    root = tmp_path / "disk"
    root.mkdir()
    recorder = Recorder(root)
    run = make_run(0)
    manager = make(run, root / "runs" / "digits")
    with monkeypatch.context() as patch:
        recorder.patch(patch)
        for serial, number in enumerate([1, 2, 2, 3], start=1):
            vars(run).update(vars(make_run(serial)))
            manager.save(number)
            recorder.num_kept = serial - 1  # `save` has waited for the one before.
            if number != 2:
                manager.sync()
                recorder.num_kept = serial
        manager.close()
    recorder.close()

    chance = random.Random(0)
    inode = root.stat().st_ino
    moments = recorder.moments
    found: dict[Image, int] = {}
    for index in range(NUM_CUTS):
        moment = moments[index * len(moments) // NUM_CUTS]
        image = cut(moment, inode, chance)
        if image not in found:
            place = tmp_path / f"image_{len(found)}"
            write(image, place)
            found[image] = find_newest(place / "runs" / "digits")
        assert found[image] >= moment.num_kept, f"cut {index}"

    # The newest after a cut is restored, and is what was saved.
    assert set(found.values()) == {0, 1, 2, 3, 4}
    last_of_each = {serial: index for index, serial in enumerate(found.values())}
    for serial, index in last_of_each.items():
        restored = make_run(0)
        place = tmp_path / f"image_{index}" / "runs" / "digits"
        make(restored, place).restore_or_initialize()
        for name, array in vars(make_run(serial)).items():
            np.testing.assert_array_equal(getattr(restored, name), array)


def write(image: Image, place: Path) -> None:
    for path, content in image:
        if content is None:
            (place / path).mkdir(parents=True)
        else:
            (place / path).write_bytes(content)
