"""Tests that damaged checkpoints are never loaded."""

import logging
import os
import re
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from etils import epath
from hypothesis import given, settings
from hypothesis import strategies as st

from armillary.checkpoint import Checkpoint, CheckpointManager, _reader
from armillary.checkpoint._checksums import CHECKSUM_FILE, read_checksums
from armillary.errors import CheckpointDamageError, CheckpointError


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


def flip_numbers(folder: Path) -> None:
    path = find_largest(folder)
    data = bytearray(path.read_bytes())
    data[3000 % len(data)] ^= 1
    path.write_bytes(data)


def forbid(folder: Path) -> None:
    """Puts a folder in the place of a file, as rights do not hold for all users."""
    path = find_largest(folder)
    path.unlink()
    path.mkdir()


def write(name: str, content: bytes) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_bytes(content)


@pytest.mark.slow
@given(data=st.data())
@settings(max_examples=80, deadline=None)
def test_one_damaged_file_gives_the_saved_state_or_the_one_before(saved, data):
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
    position = data.draw(st.integers(0, len(content) - 1), "position")
    flipped = bytearray(content)
    flipped[position] ^= 1 << data.draw(st.integers(0, 7), "bit")
    contents = [bytes(flipped), content[:position], b"", content + b"0"]
    kind = data.draw(st.sampled_from([*range(len(contents)), "delete", "folder"]))
    path.unlink()
    if kind == "folder":
        path.mkdir()
    elif kind != "delete":
        path.write_bytes(contents[kind])


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (flip_numbers, r"the content of `arrays/.*` has changed"),
        (
            lambda folder: os.truncate(find_largest(folder), 5),
            r"`arrays/.*` has 5 bytes instead of \d+",
        ),
        (lambda folder: find_largest(folder).unlink(), r"`arrays/.*` is missing"),
        (forbid, r"`arrays/.*` cannot be read"),
        (write("arrays/checkpoint", b"\x80"), "`arrays/checkpoint` was added after"),
        *(
            (write(CHECKSUM_FILE, content), f"`{CHECKSUM_FILE}` cannot be used")
            for content in (b"[]", b'{"a": 1}', b"\xff\xfe")
        ),
    ],
)
def test_a_damaged_checkpoint_is_skipped_with_a_warning_that_names_the_file(
    directory, caplog, damage, reason
):
    damage(directory / "checkpoint_2")
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


def test_a_folder_that_cannot_be_looked_into_is_damage(directory, caplog):
    shutil.rmtree(directory / "checkpoint_2")
    (directory / "checkpoint_2").symlink_to("checkpoint_2")
    restored = make_manager(Run(9), directory).restore_or_initialize()

    assert restored == str(directory / "checkpoint_1")
    assert "checkpoint_2` is damaged" in caplog.text


def test_no_good_checkpoint_is_an_error_that_lists_all_of_them(directory):
    flip_numbers(directory / "checkpoint_2")
    shutil.rmtree(directory / "checkpoint_1" / "header")
    (directory / "checkpoint_3").mkdir()
    run = Run(9)
    manager = make_manager(run, directory, init_fn=lambda: pytest.fail("from scratch"))

    with pytest.raises(
        CheckpointError, match=r"`directory` is .*all of its 3 checkpoints"
    ) as info:
        manager.restore_or_initialize()

    message = str(info.value)
    for number in (1, 3):
        place = directory / f"checkpoint_{number}"
        assert f"{place}: `header/header.json` is missing" in message
    assert f"{directory / 'checkpoint_2'}: the content of `arrays" in message
    assert run.read() == Run(9).read()


def test_an_intact_checkpoint_that_cannot_be_read_is_an_error(directory, monkeypatch):
    def fail(*_: object) -> None:
        raise RuntimeError("RESOURCE_EXHAUSTED: Out of memory")

    monkeypatch.setattr(_reader, "read_arrays", fail)

    with pytest.raises(
        CheckpointError, match=r"(?s)Reading `.*checkpoint_2` failed.*Out of memory"
    ):
        make_manager(Run(9), directory).restore_or_initialize()


def test_a_checkpoint_that_is_removed_meanwhile_is_not_damaged(
    directory, monkeypatch, caplog
):
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


def test_a_run_continues_over_a_damaged_checkpoint(directory):
    flip_numbers(directory / "checkpoint_2")
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


def test_every_file_that_is_read_has_a_checksum_and_others_do_not_matter(directory):
    folder = directory / "checkpoint_2"
    sums = read_checksums(epath.Path(folder))
    files = {path.relative_to(folder).as_posix() for path in find_files(folder)}

    assert files - sums.keys() == {CHECKSUM_FILE}
    assert sums.keys() <= files
    (folder / "notes.txt").touch()
    (folder / "arrays" / ".nfs0001").touch()
    run = Run(9)
    make_manager(run, directory).restore_or_initialize()

    assert run.read() == Run(2).read()


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a": [Infinity, 1]}'])
def test_absurd_json_is_damage(directory, text):
    (directory / "checkpoint_2" / CHECKSUM_FILE).write_text(text)
    run = Run(0)
    restored = make_manager(run, directory).restore_or_initialize()
    assert restored == str(directory / "checkpoint_1")
    assert run.read() == Run(1).read()


def test_the_next_one_is_taken_if_a_job_removes_what_was_verified(
    directory, monkeypatch
):
    verify = _reader.verify

    def verify_and_lose(folder, *arguments):
        damage = verify(folder, *arguments)
        shutil.rmtree(directory / "checkpoint_2", ignore_errors=True)
        return damage

    monkeypatch.setattr(_reader, "verify", verify_and_lose)
    run = Run(0)
    restored = make_manager(run, directory).restore_or_initialize()
    assert restored == str(directory / "checkpoint_1")
    assert run.read() == Run(1).read()
