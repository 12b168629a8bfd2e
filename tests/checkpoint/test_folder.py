"""Tests of how folders of checkpoints are recognized and removed."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from etils import epath

from armillary.checkpoint import _folder
from armillary.checkpoint._folder import Saved


def make(directory: Path, name: str, *, serial: int = 1) -> epath.Path:
    number = int(name.split("_")[1].split(".")[0])
    saved = Saved(epath.Path(), number, serial, 1.0, 0.0, has_arrays=True)
    for item in ("header", "manifest", "arrays"):
        (directory / name / item).mkdir(parents=True)
    write_header(epath.Path(directory / name), json.dumps(saved.as_json()))
    return epath.Path(directory / name)


def write_header(path: epath.Path, text: str) -> None:
    (path / _folder.HEADER).write_text(text)


def names(saved: list[Saved]) -> list[str]:
    return [entry.path.name for entry in saved]


def find(directory: Path) -> list[str]:
    return names(_folder.find_checkpoints(epath.Path(directory)))


def other_value(key: str, value: object) -> Callable[[epath.Path], None]:
    def change(path: epath.Path) -> None:
        content = json.loads((path / _folder.HEADER).read_text())
        write_header(path, json.dumps({**content, key: value}))

    return change


BROKEN: dict[str, tuple[Callable[[epath.Path], object], str]] = {
    "no header": (lambda path: (path / "header").rmtree(), "json` is missing"),
    "no arrays": (lambda path: (path / "arrays").rmtree(), "`arrays` is missing"),
    "no manifest": (lambda path: (path / "manifest").rmtree(), "`manifest` is missing"),
    **{
        f"header {text}": (
            lambda path, text=text: write_header(path, text),
            "has changed",
        )
        for text in ["{", "[]", "{}"]
    },
    "another version": (
        other_value("version", 1),
        "is of another version of Armillary: it has the format 1, and this release "
        "reads the formats 2 and 3",
    ),
    "another library": (other_value("format", "other"), "is of another library"),
    "another number": (other_value("number", 7), "belongs to checkpoint 7"),
}


@pytest.mark.parametrize(("damage", "reason"), BROKEN.values(), ids=BROKEN)
def test_a_broken_folder_is_no_checkpoint_and_has_a_reason(tmp_path, damage, reason):
    make(tmp_path, "checkpoint_1")
    broken = make(tmp_path, "checkpoint_2", serial=2)
    damage(broken)

    assert find(tmp_path) == ["checkpoint_1"]
    assert reason in _folder.list_directory(epath.Path(tmp_path))[1][broken]


def test_a_number_gets_a_revision_if_anything_has_its_name(tmp_path):
    def choose() -> str:
        directory = epath.Path(tmp_path)
        saved = _folder.list_directory(directory)[0]
        return _folder.choose_path(directory, 5, saved).name

    assert choose() == "checkpoint_5"

    make(tmp_path, "checkpoint_5")
    make(tmp_path, "checkpoint_50")
    assert choose() == "checkpoint_5.1"

    make(tmp_path, "checkpoint_5.1", serial=2)
    assert find(tmp_path) == ["checkpoint_50", "checkpoint_5.1"]
    (tmp_path / "checkpoint_5" / _folder.HEADER).unlink()
    assert choose() == "checkpoint_5.2"

    # The name of one that was removed is not used again: it may have been read.
    (tmp_path / "checkpoint_5").rename(tmp_path / "checkpoint_5.2")
    assert choose() == "checkpoint_5.3"


def test_leftovers_go_and_nothing_else(tmp_path):
    for name in (
        "checkpoint_5.orbax-checkpoint-tmp",
        "checkpoint_5.1.orbax-checkpoint-tmp-170",
        "checkpoint_6.armillary-removed",
    ):
        (tmp_path / name / "arrays").mkdir(parents=True)
    kept = {"checkpoint_2", "events.orbax-checkpoint-tmp", "train"}
    for name in kept:
        (tmp_path / name).mkdir()
    (tmp_path / "checkpoint_7.orbax-checkpoint-tmp").touch()

    _folder.remove_unfinished(epath.Path(tmp_path) / "checkpoint_5.1")
    assert len(list(tmp_path.iterdir())) == 6
    _folder.remove_leftovers(epath.Path(tmp_path))

    left = {path.name for path in tmp_path.iterdir()}
    assert left == {*kept, "checkpoint_7.orbax-checkpoint-tmp"}
