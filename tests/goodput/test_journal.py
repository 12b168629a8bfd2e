"""What is appended can be read, and what a crash leaves does no harm."""

import os
import stat

import jax
import pytest

from armillary.goodput import Category
from armillary.goodput._journal import Entry, Journal, read_entries


def make_entry(step=0, **changes):
    values = {
        "attempt": "a",
        "event": "loop",
        "time": 1.5e9,
        "step": step,
        "is_done": False,
        "seconds": {Category.STEPPING: 1.25},
    }
    return Entry(**{**values, **changes})


def append(directory, *entries):
    journal = Journal(directory)
    for entry in entries:
        journal.append(entry)
    return directory / "goodput.jsonl"


def test_entries_of_all_attempts_come_back_as_they_were(tmp_path):
    entries = [make_entry(), make_entry(20, is_done=True, event="end", seconds={})]

    append(tmp_path / "a" / "b", *entries)
    path = append(tmp_path / "a" / "b", make_entry(21))

    assert read_entries(path) == ([*entries, make_entry(21)], [])
    assert len(path.read_bytes()) < 250 * 3


@pytest.mark.parametrize("cut", [1, 20, 60])
def test_half_a_line_of_a_crash_is_skipped(tmp_path, cut):
    path = append(tmp_path, make_entry(1), make_entry(2))
    path.write_bytes(path.read_bytes()[:-cut])
    append(tmp_path, make_entry(3))

    entries, unreadable = read_entries(path)

    # Without its newline alone, a line is complete.
    assert [entry.step for entry in entries] == ([1, 2, 3] if cut == 1 else [1, 3])
    assert unreadable == ([] if cut == 1 else [2])


def test_other_lines_are_reported_by_number(tmp_path):
    path = append(tmp_path, make_entry(1))
    others = [b"\xff\x00\x80", b"{}", b"[1]", b"null", b'{"format": "something-1"}']
    cut = b'{"format": "armillary-goodput-1", "attempt": "a"}'
    path.write_bytes(b"\n".join([path.read_bytes(), *others, cut]))
    append(tmp_path, make_entry(2))

    entries, unreadable = read_entries(path)

    assert [entry.step for entry in entries] == [1, 2]
    assert unreadable == [3, 4, 5, 6, 7, 8]


def test_a_file_without_entries_of_this_version_is_an_error(tmp_path):
    path = append(tmp_path, make_entry(1))
    path.write_bytes(path.read_bytes().replace(b"goodput-1", b"goodput-7"))

    with pytest.raises(ValueError, match=r"1 lines .* 'armillary-goodput-1', which"):
        read_entries(path)


def test_a_file_that_cannot_be_read_is_an_error(tmp_path):
    with pytest.raises(ValueError, match=r"cannot be read \(Is a directory\), but it"):
        read_entries(tmp_path)


def test_the_file_has_the_rights_that_the_user_asks_for(tmp_path):
    previous = os.umask(0o027)
    try:
        path = append(tmp_path, make_entry())
    finally:
        os.umask(previous)

    assert stat.S_IMODE(path.stat().st_mode) == 0o640


def test_a_failure_is_logged_once_and_ends_the_recording(tmp_path, caplog):
    (tmp_path / "file").touch()

    append(tmp_path / "file" / "run", make_entry(1), make_entry(2))

    assert len(caplog.records) == 1
    assert "so where the time goes is not recorded from here on" in caplog.text


def test_a_line_that_does_not_fit_on_the_disk_is_a_failure(caplog):
    # The system's own full disk.
    journal = Journal("/dev")
    journal._path = journal._path.with_name("full")

    journal.append(make_entry())

    assert "No space left on device" in caplog.text


def test_only_the_first_process_of_a_job_writes(tmp_path, monkeypatch):
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(jax, "process_index", lambda: 1)

    append(tmp_path, make_entry())

    assert not list(tmp_path.iterdir())
