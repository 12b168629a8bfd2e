"""Tests of the recorder: what it writes, when, and how its file is read."""

import itertools
import json
import sys
from pathlib import Path

import jax
import pytest

from armillary.goodput import Category, _journal
from armillary.goodput._journal import (
    FILE_NAME,
    Entry,
    Recorder,
    add_up,
    make_recorder,
    read_entries,
)
from tests.goodput.conftest import write_entries


def run(recorder, step=0, *, reached=True):
    return recorder.run(step, lambda: reached)


def entries_of(directory):
    return read_entries(directory / FILE_NAME)


def test_a_run_from_the_start_of_its_process(tmp_path, clock):
    recorder = Recorder(tmp_path, start_up_seconds=3.0)
    with recorder.phase(Category.RESTORING):
        clock.now += 1
    clock.now += 2
    with run(recorder, step=10):
        with recorder.phase(Category.STEPPING):
            clock.now += 20
        recorder.mark("loop", 15)
    clock.now += 1000

    entries = entries_of(tmp_path)
    assert [(entry.event, entry.step, entry.is_done) for entry in entries] == [
        ("start", 10, False),
        ("loop", 15, False),
        ("end", 15, True),
    ]
    goodput = add_up(entries)
    assert goodput.seconds[Category.START_UP] == 5
    assert goodput.seconds[Category.RESTORING] == 1
    assert goodput.seconds[Category.STEPPING] == 20
    assert goodput.total_seconds == 26 == sum(recorder.seconds.values())


def test_time_between_calls_is_not_counted(tmp_path, clock):
    recorder = Recorder(tmp_path)
    recorder.mark("evaluation", 0)
    assert not list(tmp_path.iterdir())  # Nothing is written before training.
    with run(recorder):
        clock.now += 1
    clock.now += 1000
    with recorder.phase(Category.EVALUATING):
        clock.now += 2
    recorder.mark("evaluation", 0)
    clock.now += 1000
    with run(recorder):
        clock.now += 4

    entries = entries_of(tmp_path)
    assert add_up(entries).total_seconds == 7
    assert [entry.is_done for entry in entries] == [False, True, True, False, True]


def test_lines_of_loops_thin_out_and_others_do_not(tmp_path, clock):
    recorder = Recorder(tmp_path)
    with run(recorder):
        for step in range(1, 20_001):
            clock.now += 0.1
            recorder.mark("loop", step)
        recorder.mark("save", 20_000)

    *entries, save, _ = entries_of(tmp_path)
    times = [entry.time - 1000 for entry in entries]
    gaps = [later - time for time, later in itertools.pairwise(times)]
    assert gaps[0] == pytest.approx(0.1)
    assert max(gaps) <= 10.2
    assert len(times) < 700
    assert save.event == "save"


def test_all_that_was_done_before_going_back_is_lost(tmp_path, clock):
    recorder = Recorder(tmp_path)

    def train(seconds):
        with recorder.phase(Category.STEPPING):
            clock.now += seconds

    with run(recorder):
        train(10.0)
        recorder.mark("save", 10)
        for step in (11, 12):
            train(0.05)
            recorder.mark("loop", step)
        train(5.0)  # This one ends in values that are not finite.
        with recorder.phase(Category.RESTORING):
            clock.now += 1.0
        recorder.mark("restore", 10)
        train(3.0)
        recorder.mark("loop", 14)

    goodput = add_up(entries_of(tmp_path))
    assert goodput.seconds[Category.STEPPING] == pytest.approx(13.0)
    assert goodput.seconds[Category.LOST] == pytest.approx(5.1)
    assert goodput.seconds[Category.RESTORING] == pytest.approx(1.0)
    assert (goodput.num_steps, goodput.num_lost_steps) == (14, 2)


@pytest.mark.parametrize(
    ("directory", "index"), [(None, 0), ("gs://bucket/run", 0), ("run", 1)]
)
def test_nothing_is_written_elsewhere_than_in_a_directory_of_the_first_process(
    directory, index, tmp_path, monkeypatch
):
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: index > 0)
    monkeypatch.setattr(jax, "process_index", lambda: index)
    monkeypatch.chdir(tmp_path)
    with run(make_recorder(directory)):
        pass

    assert not list(tmp_path.iterdir())


def test_the_first_recorder_accounts_for_the_start_of_the_process(monkeypatch):
    monkeypatch.setattr(_journal, "_is_claimed", False)
    assert _journal._claim_start_up() > 0.3
    assert _journal._claim_start_up() == 0
    # At a prompt, time goes to thinking.
    monkeypatch.setattr(_journal, "_is_claimed", False)
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    assert _journal._claim_start_up() == 0


def make_entry(step=0, event="loop", is_done=False, seconds=1.25):
    return Entry("a", event, 1.5e9, step, is_done, {Category.STEPPING: seconds})


def test_lines_of_others_are_left_out(tmp_path):
    write_entries(tmp_path, make_entry(1))
    path = tmp_path / FILE_NAME
    known = json.loads(path.read_text())
    wrong = [{"time": "noon"}, {"time": 1e999}, {"step": None}, {"seconds": {"x": 1}}]
    others = [b"\xff\x00", b"{}", b"[1]", b"null", b"[" * 5000 + b"]" * 5000]
    others += [json.dumps(known | field).encode() for field in wrong]
    others += [json.dumps(known | {"format": "something-1"}).encode()]
    path.write_bytes(b"\n".join([path.read_bytes(), *others]) + b"\n")
    write_entries(tmp_path, make_entry(2), make_entry(3))
    # A crash cuts the last line off, and the next attempt begins one of its own.
    path.write_bytes(path.read_bytes()[:-20])
    with run(Recorder(tmp_path), step=4):
        pass

    assert [entry.step for entry in entries_of(tmp_path)] == [1, 2, 4, 4]


def test_a_file_without_entries_of_this_version_is_an_error(tmp_path):
    write_entries(tmp_path, make_entry(1))
    path = tmp_path / FILE_NAME
    path.write_bytes(path.read_bytes().replace(b"goodput-1", b"goodput-7"))

    with pytest.raises(ValueError, match=r"1 lines, .* 'armillary-goodput-1', which"):
        read_entries(path)
    with pytest.raises(ValueError, match=r"cannot be read \(Is a directory\), but it"):
        read_entries(tmp_path)


@pytest.mark.parametrize(
    ("path", "problem"),
    [("/dev/full", "No space left on device"), ("{}/file/run", "File exists")],
)
def test_a_failure_is_logged_once_and_ends_the_recording(
    path, problem, tmp_path, caplog
):
    (tmp_path / "file").touch()
    recorder = Recorder(tmp_path)
    recorder._file._path = Path(path.format(tmp_path))

    with run(recorder):
        recorder.mark("save", 1)

    (record,) = caplog.records
    assert problem in record.getMessage()
    assert "where the time goes is not recorded from here on" in record.getMessage()
