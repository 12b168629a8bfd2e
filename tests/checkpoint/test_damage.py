"""Tests of checkpoints that are not as they were saved."""

import logging
import os
import re
import shutil
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from etils import epath
from hypothesis import given, settings
from hypothesis import strategies as st

from armillary.checkpoint import Checkpoint, CheckpointManager, _reader
from armillary.checkpoint._folder import CHECKSUM_FILE, read_checksums
from armillary.errors import (
    CheckpointDamageError,
    CheckpointError,
)


class Run:
    """Arrays that no compression shortens, a random key and a data position."""

    def __init__(self, step: int) -> None:
        self.weights = {
            "w": jax.random.normal(jax.random.key(step), (40, 25)),
            "b": jnp.full(7, float(step)),
        }
        self.key = jax.random.key(step)
        self.index = step

    def get_state(self) -> dict[str, int]:
        return {"index": self.index}

    def set_state(self, state: dict[str, int]) -> None:
        self.index = state["index"]

    def read(self) -> list[bytes]:
        weights = [self.weights[name] for name in ("w", "b")]
        arrays = [*weights, jax.random.key_data(self.key)]
        return [*(np.asarray(array).tobytes() for array in arrays), bytes([self.index])]


def make_manager(run: Run, directory: Path, **kwargs: object) -> CheckpointManager:
    return CheckpointManager(Checkpoint(run=run), directory, **kwargs)


def save(directory: Path, *steps: int) -> None:
    for step in steps:
        manager = make_manager(Run(step), directory)
        manager.save(step)
        manager.close()


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a directory with two checkpoints, to be copied and not changed."""
    directory = tmp_path_factory.mktemp("saved")
    save(directory, 1, 2)
    return directory


@pytest.fixture
def directory(saved: Path, tmp_path: Path) -> Path:
    """Returns a copy of it."""
    return Path(shutil.copytree(saved, tmp_path / "run"))


def find_files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def find_largest(folder: Path) -> Path:
    return max((folder / "arrays").rglob("d/*"), key=lambda path: path.stat().st_size)


def flip_bit(path: Path, position: int = 3000) -> None:
    data = bytearray(path.read_bytes())
    data[position % len(data)] ^= 1
    path.write_bytes(data)


@pytest.mark.slow
@given(data=st.data())
@settings(max_examples=80, deadline=None)
def test_one_damaged_file_gives_the_saved_state_or_the_one_before(
    saved: Path, data: st.DataObject
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(shutil.copytree(saved, folder, dirs_exist_ok=True))
        # By position: the names of array files are random.
        files = find_files(directory / "checkpoint_2")
        path = files[data.draw(st.integers(0, len(files) - 1), "file")]
        if data.draw(st.booleans(), "of the numbers"):
            path = find_largest(directory / "checkpoint_2")
        damage(path, data)
        run = Run(9)
        restored = make_manager(run, directory).restore_or_initialize()

        assert restored is not None
        number = int(restored.rpartition("_")[2])
        assert number in {1, 2}
        assert number == 1 or "/d/" not in str(path)
        assert run.read() == Run(number).read()


def damage(path: Path, data: st.DataObject) -> None:
    content = path.read_bytes()
    kind = data.draw(
        st.sampled_from(["flip", "truncate", "empty", "delete", "folder", "longer"])
    )
    if kind in {"delete", "folder"}:
        path.unlink()
        if kind == "folder":
            path.mkdir()
        return
    if kind == "flip":
        position = data.draw(st.integers(0, len(content) - 1), "position")
        bit = 1 << data.draw(st.integers(0, 7), "bit")
        changed = bytes([content[position] ^ bit])
        content = content[:position] + changed + content[position + 1 :]
    elif kind == "truncate":
        content = content[: data.draw(st.integers(0, len(content) - 1), "size")]
    else:
        content = b"" if kind == "empty" else content + b"0"
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (flip_bit, r"the content of `arrays/.*` has changed"),
        (lambda path: os.truncate(path, 5), r"`arrays/.*` has 5 bytes instead of \d+"),
        (Path.unlink, r"`arrays/.*` is missing"),
    ],
    ids=["flipped", "truncated", "missing"],
)
def test_a_damaged_checkpoint_is_skipped_with_a_warning_that_names_the_file(
    directory: Path, caplog: pytest.LogCaptureFixture, damage: object, reason: str
) -> None:
    damage(find_largest(directory / "checkpoint_2"))
    run = Run(9)
    with caplog.at_level(logging.WARNING, "armillary"):
        restored = make_manager(run, directory).restore_or_initialize()

    assert restored == str(directory / "checkpoint_1")
    assert run.read() == Run(1).read()
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert f"`{directory / 'checkpoint_2'}` is damaged" in record.getMessage()
    assert f"Taking `{directory / 'checkpoint_1'}` instead" in record.getMessage()
    # By name, none takes its place.
    run = Run(9)
    with pytest.raises(CheckpointDamageError, match=reason) as raised:
        make_manager(run, directory).restore(directory / "checkpoint_2")
    assert re.match(reason, raised.value.damage)
    assert run.read() == Run(9).read()


@pytest.mark.parametrize("place", [".", "header/header.json", CHECKSUM_FILE, "arrays"])
def test_a_checkpoint_without_rights_is_skipped_with_a_warning(
    saved: Path, caplog: pytest.LogCaptureFixture, place: str
) -> None:
    # Not below pytest's own folder, which only this user can enter.
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(shutil.copytree(saved, folder, dirs_exist_ok=True))
        make_manager(Run(9), directory).restore_or_initialize()
        path = directory / "checkpoint_2" / place
        for file in [path, *path.rglob("d/*")] if place == "arrays" else [path]:
            if file.is_file() or place == ".":
                file.chmod(0)
        directory.chmod(0o755)
        run = Run(9)
        with as_another_user(), caplog.at_level(logging.WARNING, "armillary"):
            restored = make_manager(run, directory).restore_or_initialize()
        (directory / "checkpoint_2").chmod(0o755)

        assert restored == str(directory / "checkpoint_1")
        assert run.read() == Run(1).read()
        assert "checkpoint_2` is damaged" in caplog.text


class as_another_user:  # noqa: N801
    """A context in which the rights of files count, also for root."""

    def __enter__(self) -> None:
        self._user = os.geteuid()
        if self._user == 0:
            os.seteuid(65534)

    def __exit__(self, *_: object) -> None:
        if self._user == 0:
            os.seteuid(self._user)


def test_no_good_checkpoint_is_an_error_that_lists_all_of_them(directory: Path) -> None:
    flip_bit(find_largest(directory / "checkpoint_2"))
    shutil.rmtree(directory / "checkpoint_1" / "header")
    (directory / "checkpoint_3").mkdir()
    run = Run(9)
    manager = make_manager(run, directory, init_fn=lambda: pytest.fail("from scratch"))

    with pytest.raises(
        CheckpointError, match=r"`directory` is .*none of its 3 checkpoints"
    ) as info:
        manager.restore_or_initialize()

    message = str(info.value)
    for number in (1, 3):
        place = directory / f"checkpoint_{number}"
        assert f"{place}: `header/header.json` is missing" in message
    assert f"{directory / 'checkpoint_2'}: the content of `arrays" in message
    assert run.read() == Run(9).read()


def test_an_intact_checkpoint_that_cannot_be_read_is_an_error(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("RESOURCE_EXHAUSTED: Out of memory")

    monkeypatch.setattr(_reader, "read_arrays", fail)

    with pytest.raises(
        CheckpointError, match=r"(?s)Reading `.*checkpoint_2` failed.*Out of memory"
    ):
        make_manager(Run(9), directory).restore_or_initialize()


def test_a_checkpoint_that_is_removed_meanwhile_is_not_damaged(
    directory: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    find_damage = _reader.find_damage

    def remove_and_find(folder: Path) -> str | None:
        if folder.name == "checkpoint_2":
            shutil.rmtree(folder)
        return find_damage(folder)

    monkeypatch.setattr(_reader, "find_damage", remove_and_find)
    run = Run(9)
    make_manager(run, directory).restore_or_initialize()
    assert run.read() == Run(1).read()
    assert caplog.text == ""


def test_a_run_goes_on_over_a_damaged_checkpoint(directory: Path) -> None:
    flip_bit(find_largest(directory / "checkpoint_2"))
    run = Run(9)
    manager = make_manager(run, directory)
    manager.restore_or_initialize()
    run.index = 4
    manager.save(2)
    manager.close()
    names = sorted(os.listdir(directory))
    other = Run(9)
    make_manager(other, directory).restore_or_initialize()

    assert names == ["checkpoint_1", "checkpoint_2.1"]
    assert other.index == 4


@pytest.mark.parametrize("content", [b"[]", b'{"a": 1}', b"\xff\xfe"])
def test_checksums_that_are_none_are_damage(directory: Path, content: bytes) -> None:
    (directory / "checkpoint_2" / CHECKSUM_FILE).write_bytes(content)

    with pytest.raises(CheckpointError, match=f"`{CHECKSUM_FILE}` cannot be used"):
        make_manager(Run(9), directory).restore(directory / "checkpoint_2")


def test_every_file_that_is_read_has_a_checksum(directory: Path) -> None:
    folder = directory / "checkpoint_2"
    sums = read_checksums(epath.Path(folder))
    files = {path.relative_to(folder).as_posix() for path in find_files(folder)}

    # Orbax 0.12 writes the last one, and nobody reads it.
    others = {CHECKSUM_FILE, "_CHECKPOINT_METADATA", "commit_success.txt"}
    assert {CHECKSUM_FILE, "_CHECKPOINT_METADATA"} <= files - sums.keys() <= others
    assert sums.keys() <= files


def test_a_file_added_among_the_arrays_is_damage(directory: Path) -> None:
    # Orbax reads a file of this name in place of the arrays.
    (directory / "checkpoint_2" / "arrays" / "checkpoint").write_bytes(b"\x80")
    run = Run(9)
    manager = make_manager(run, directory)
    with pytest.raises(CheckpointError, match="`arrays/checkpoint` was added after"):
        manager.restore(directory / "checkpoint_2")
    manager.restore_or_initialize()

    assert run.read() == Run(1).read()


def test_what_lies_beside_the_files_that_are_read_does_not_matter(
    directory: Path,
) -> None:
    (directory / "checkpoint_2" / "notes.txt").touch()
    (directory / "checkpoint_2" / "arrays" / ".nfs0001").touch()
    for name in ("_CHECKPOINT_METADATA", "commit_success.txt"):
        (directory / "checkpoint_2" / name).unlink(missing_ok=True)
    run = Run(9)
    make_manager(run, directory).restore_or_initialize()

    assert run.read() == Run(2).read()
