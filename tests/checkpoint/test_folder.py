"""Tests of which folders are checkpoints, and which of them go."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from etils import epath

from armillary.checkpoint import _folder
from armillary.checkpoint._folder import Header, Saved

HOUR = 3600.0


def make(
    directory: Path, name: str, *, serial: int = 1, saved_at: float = 1.0
) -> epath.Path:
    number = int(name.split("_")[1].split(".")[0])
    header = Header(number, serial, saved_at, 0.0, has_arrays=True)
    for item in ("header", "manifest", "arrays"):
        (directory / name / item).mkdir(parents=True)
    path = directory / name / "header" / _folder.HEADER_FILE
    path.write_text(json.dumps(header.as_json()))
    return epath.Path(directory / name)


def names(saved: list[Saved]) -> list[str]:
    return [entry.path.name for entry in saved]


def entries(*saved_at: float) -> list[Saved]:
    return [
        Saved(epath.Path(f"checkpoint_{i}"), Header(i, i, time, 0.0, has_arrays=True))
        for i, time in enumerate(saved_at)
    ]


def test_checkpoints_are_found_in_the_order_of_saving(tmp_path: Path) -> None:
    make(tmp_path, "checkpoint_300", serial=1)
    make(tmp_path, "checkpoint_1000", serial=2)
    make(tmp_path, "checkpoint_200", serial=3)

    found = _folder.find_checkpoints(epath.Path(tmp_path))

    assert names(found) == ["checkpoint_300", "checkpoint_1000", "checkpoint_200"]


def test_a_directory_that_does_not_exist_has_no_checkpoints(tmp_path: Path) -> None:
    assert _folder.find_checkpoints(epath.Path(tmp_path / "none")) == []


@pytest.mark.parametrize("item", ["header", "manifest", "arrays"])
def test_a_folder_without_an_item_is_not_a_checkpoint(
    tmp_path: Path, item: str
) -> None:
    path = make(tmp_path, "checkpoint_1")
    (path / item).rmtree()

    assert _folder.read_header(path) is None


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "3", "{}", '{"format": "other", "version": 1}'],
)
def test_a_damaged_or_foreign_header_is_not_a_checkpoint(
    tmp_path: Path, text: str
) -> None:
    path = make(tmp_path, "checkpoint_1")
    (path / "header" / _folder.HEADER_FILE).write_text(text)

    assert _folder.read_header(path) is None


@pytest.mark.parametrize(
    "name",
    [
        "checkpoint_5.orbax-checkpoint-tmp",
        "checkpoint_5.armillary-removed",
        "checkpoint_x",
        "my_checkpoint_5",
    ],
)
def test_other_names_are_not_checkpoints(tmp_path: Path, name: str) -> None:
    make(tmp_path, "checkpoint_5").rename(tmp_path / name)

    assert _folder.find_checkpoints(epath.Path(tmp_path)) == []


def test_a_number_gets_a_revision_if_anything_has_its_name(tmp_path: Path) -> None:
    def choose() -> str:
        directory = epath.Path(tmp_path)
        saved = _folder.find_checkpoints(directory)
        return _folder.choose_path(directory, 5, saved).name

    assert choose() == "checkpoint_5"

    make(tmp_path, "checkpoint_5")
    make(tmp_path, "checkpoint_50")
    assert choose() == "checkpoint_5.1"

    make(tmp_path, "checkpoint_5.1")
    (tmp_path / "checkpoint_5" / "header" / _folder.HEADER_FILE).unlink()
    assert choose() == "checkpoint_5.2"

    # The name of one that was removed is not used again: it may have been read.
    (tmp_path / "checkpoint_5").rename(tmp_path / "checkpoint_5.2")
    assert choose() == "checkpoint_5.3"


def test_the_last_save_of_a_number_supersedes_the_others(tmp_path: Path) -> None:
    make(tmp_path, "checkpoint_5", serial=1)
    make(tmp_path, "checkpoint_6", serial=2)
    make(tmp_path, "checkpoint_5.1", serial=3)

    saved = _folder.find_checkpoints(epath.Path(tmp_path))

    assert names(_folder.find_superseded(saved)) == ["checkpoint_5"]


def test_the_newest_stay() -> None:
    expired, preserved_at = _folder.find_expired(
        entries(1, 2, 3, 4), max_to_keep=3, keep_every_hours=None, preserved_at=0.0
    )

    assert names(expired) == ["checkpoint_0"]
    assert preserved_at == 0.0


def test_no_limit_keeps_all() -> None:
    expired, _ = _folder.find_expired(
        entries(*range(1, 50)), max_to_keep=None, keep_every_hours=1, preserved_at=0.0
    )

    assert expired == []


def test_old_ones_stay_if_they_are_hours_apart() -> None:
    saved = entries(0.5 * HOUR, 1 * HOUR, 1.5 * HOUR, 2.5 * HOUR, 3 * HOUR)

    expired, preserved_at = _folder.find_expired(
        saved, max_to_keep=1, keep_every_hours=1, preserved_at=0.0
    )

    assert names(expired) == ["checkpoint_0", "checkpoint_2"]
    assert preserved_at == 2.5 * HOUR


def test_those_that_stay_for_good_are_not_counted_again() -> None:
    saved = entries(1 * HOUR, 2 * HOUR, 2.1 * HOUR, 2.2 * HOUR)

    expired, preserved_at = _folder.find_expired(
        saved, max_to_keep=1, keep_every_hours=1, preserved_at=2 * HOUR
    )

    assert names(expired) == ["checkpoint_2"]
    assert preserved_at == 2 * HOUR


def test_leftovers_go_and_nothing_else(tmp_path: Path) -> None:
    for name in (
        "checkpoint_5.orbax-checkpoint-tmp",
        "checkpoint_5.1.orbax-checkpoint-tmp-170",
        "checkpoint_6.armillary-removed",
    ):
        (tmp_path / name / "arrays").mkdir(parents=True)
    kept = [
        make(tmp_path, "checkpoint_1").name,
        "checkpoint_2",
        "events.orbax-checkpoint-tmp",
        "train",
    ]
    for name in kept[1:]:
        (tmp_path / name).mkdir()
    (tmp_path / "checkpoint_7.orbax-checkpoint-tmp").touch()

    _folder.remove_leftovers(epath.Path(tmp_path))

    left = {path.name for path in tmp_path.iterdir()}
    assert left == {*kept, "checkpoint_7.orbax-checkpoint-tmp"}


def test_an_interrupted_removal_leaves_no_half_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make(tmp_path, "checkpoint_1")

    def fail(_: object) -> None:
        raise OSError("interrupted")

    with monkeypatch.context() as patch:
        patch.setattr(type(path), "rmtree", fail)
        with pytest.raises(OSError, match="interrupted"):
            _folder.remove(path)

    assert _folder.find_checkpoints(epath.Path(tmp_path)) == []
    _folder.remove_leftovers(epath.Path(tmp_path))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("is_seen_as_folder", [True, False])
def test_a_checkpoint_that_is_removed_meanwhile_is_not_broken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_seen_as_folder: bool
) -> None:
    path = make(tmp_path, "checkpoint_1")

    def read_and_remove(path: epath.Path) -> str:
        path.rmtree()
        if is_seen_as_folder:
            monkeypatch.setattr(type(path), "is_dir", lambda path: True)
        return "`header/header.json` is missing"

    monkeypatch.setattr(_folder, "_read_header", read_and_remove)

    assert _folder.list_directory(epath.Path(tmp_path))[1] == {}
    assert not path.exists()


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda path: (path / "header" / "header.json").unlink(), "json` is missing"),
        (lambda path: (path / "header" / "header.json").write_text("{"), "is not what"),
        (
            lambda path: (path / "header" / "header.json").write_text(
                '{"format": "armillary-checkpoint", "version": 1}'
            ),
            "is of another version",
        ),
        (lambda path: (path / "arrays").rmtree(), "`arrays` is missing"),
        (lambda path: (path / "manifest").rmtree(), "`manifest` is missing"),
    ],
)
def test_what_is_broken_has_a_reason(
    tmp_path: Path, damage: Callable[[epath.Path], object], reason: str
) -> None:
    path = make(tmp_path, "checkpoint_1")
    damage(path)

    assert reason in _folder.list_directory(epath.Path(tmp_path))[1][path]


@pytest.mark.parametrize("key", ["number", "serial", "saved_at", "preserved_at"])
@pytest.mark.parametrize("value", ["1", None, [1]])
def test_a_header_of_other_types_is_broken(
    tmp_path: Path, key: str, value: object
) -> None:
    make(tmp_path, "checkpoint_1")
    broken = make(tmp_path, "checkpoint_2", serial=2)
    file = broken / "header" / _folder.HEADER_FILE
    file.write_text(json.dumps({**json.loads(file.read_text()), key: value}))

    assert names(_folder.find_checkpoints(epath.Path(tmp_path))) == ["checkpoint_1"]
    assert list(_folder.list_directory(epath.Path(tmp_path))[1]) == [broken]
