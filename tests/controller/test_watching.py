"""Tests of evaluating the checkpoints of another job, each once."""

import json
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
from etils import epath

from armillary import _process
from armillary._process import Process
from armillary.checkpoint._best import Mark, write_best
from armillary.checkpoint._folder import Saved
from armillary.controller import _directory, _saving
from armillary.controller._directory import (
    announce_ends,
    end_training,
    read_end,
    training_in,
)
from armillary.controller._saving import Saving
from armillary.controller._stop_request import StopRequest
from tests.patience import patience


class Folder:
    """Stands for a manager: `look` lists its checkpoints."""

    directory = ""

    def __init__(self, look):
        self.look = look

    @property
    def checkpoints(self):
        return self.look()


def watch(look, timeout=0.0, timeout_fn=None, stop=None):
    run: Any = SimpleNamespace(stop=stop or StopRequest(), trainer=None)
    manager: Any = Folder(look)
    return Saving(run, manager).watch(timeout, timeout_fn)


def test_each_checkpoint_comes_once_oldest_first():
    checkpoints, seen = ["1", "2", "3"], []

    for path in watch(lambda: list(checkpoints)):
        seen.append(path)
        if path == "1":  # Meanwhile one is written, and one deleted.
            checkpoints.append("4")
            checkpoints.remove("2")

    assert seen == ["1", "3", "4"]


def test_a_checkpoint_that_is_saved_again_under_its_name_comes_again():
    looks = [["1", "2"], ["2"], ["2", "1"]]

    def look():
        return looks.pop(0) if len(looks) > 1 else looks[0]

    assert list(watch(look)) == ["1", "2", "1"]


def test_the_launcher_receives_each_checkpoint_that_is_evaluated(monkeypatch):
    sent = []
    monkeypatch.setattr(_saving, "notify_launcher", lambda *words: sent.append(words))
    list(watch(lambda: ["1", "2"]))
    assert sent == [("evaluating", "1"), ("evaluating", "2")]


def test_timeout_function_decides_whether_to_wait_on():
    checkpoints = []
    calls = []

    def is_over():
        calls.append(None)
        if len(calls) == 2:
            checkpoints.append("1")
        return len(calls) == 3

    found = list(watch(lambda: list(checkpoints), timeout=0.01, timeout_fn=is_over))

    assert found == ["1"]
    assert len(calls) == 3


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(_saving, "_POLL_SECONDS", 0.01)
    monkeypatch.setattr(_saving, "_OLD_END_SECONDS", 1e9)


def test_the_last_checkpoint_of_a_job_that_ends_meanwhile_is_found(monkeypatch, quick):
    checkpoints, ends = [], []

    def look():
        found = list(checkpoints)
        if not checkpoints:
            # Between this look at the directory and the next one.
            checkpoints.append("1")
            ends.append("end")
        return found

    monkeypatch.setattr(_saving, "read_end", lambda _: ends[0] if ends else None)
    assert list(watch(look, timeout=None)) == ["1"]


def test_the_end_of_an_earlier_training_does_not_count_while_another_begins(
    monkeypatch, quick
):
    # The end of the earlier training, then none, then the end of the continued one.
    ends = ["old", "old", "old", None, None, "new"]
    checkpoints = ["1"]

    def find_end(directory):
        if len(ends) == 3:
            checkpoints.append("2")
        return ends.pop(0) if len(ends) > 1 else ends[0]

    monkeypatch.setattr(_saving, "read_end", find_end)
    assert list(watch(lambda: list(checkpoints), timeout=None)) == ["1", "2"]
    assert ends == ["new"]


def test_the_end_of_an_earlier_training_counts_if_no_other_one_begins(
    monkeypatch, quick
):
    now = 0.0

    def sleep(seconds):
        nonlocal now
        now += seconds

    clock = SimpleNamespace(monotonic=lambda: now, sleep=sleep)
    monkeypatch.setattr(_saving, "time", clock)
    monkeypatch.setattr(_saving, "_OLD_END_SECONDS", 0.3)
    monkeypatch.setattr(_saving, "read_end", lambda _: "old")
    assert list(watch(lambda: ["1"], timeout=None)) == ["1"]
    assert now == pytest.approx(0.3)


def test_stop_ends_the_watch():
    stop, seen = StopRequest(), []
    for path in watch(lambda: ["1", "2"], timeout=None, stop=stop):
        seen.append(path)
        stop.make("enough")

    assert seen == ["1"]


@pytest.fixture(autouse=True)
def texts(monkeypatch):
    monkeypatch.setattr(_directory, "_ends", texts := {})
    return texts


@pytest.mark.slow
def test_the_chief_says_it_when_the_interpreter_ends(tmp_path, monkeypatch):
    code = (
        "import sys; "
        "from armillary.controller._directory import end_training, read_end; "
        "end_training(sys.argv[1], 7); assert read_end(sys.argv[1]) is None"
    )
    subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], check=True, timeout=patience(120)
    )
    record = read_end(str(tmp_path))
    assert json.loads(record)["step"] == 7
    monkeypatch.setattr(_process, "_current", Process(1, 2))
    with training_in(str(tmp_path)):
        pass
    end_training(str(tmp_path), 5)
    announce_ends()
    assert read_end(str(tmp_path)) == record


def can_lock(folder):
    """Returns whether a second program can train in a folder."""
    code = (
        "import fcntl, sys; file = open(sys.argv[1], 'a+'); "
        "fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)"
    )
    command = [sys.executable, "-S", "-c", code, str(folder / ".lock")]
    return not subprocess.run(command, check=False, timeout=patience(120)).returncode


def test_a_training_within_a_training_leaves_the_lock(tmp_path):
    folder = str(tmp_path)
    with training_in(folder):
        with training_in(folder):
            pass
        assert not can_lock(tmp_path)
    assert can_lock(tmp_path)


def test_to_record_the_best_checkpoint_leaves_the_lock(tmp_path):
    place = epath.Path(tmp_path)
    saved = Saved(place / "checkpoint_1", 1, 1, 1.0, 1.0, has_arrays=True)
    with training_in(str(tmp_path)):
        write_best(place, saved, Mark("loss", higher_is_better=False, value=0.5))
        assert not can_lock(tmp_path)


def test_a_failed_training_is_not_over_although_one_within_it_is(tmp_path):
    folder = str(tmp_path)

    def train():
        with training_in(folder):
            with training_in(folder):
                end_training(folder, 5)
            raise RuntimeError("no memory")

    with pytest.raises(RuntimeError, match="no memory"):
        train()
    announce_ends()
    assert read_end(folder) is None


def test_each_end_of_a_training_is_another_one(tmp_path):
    folder = str(tmp_path)
    ends = []
    for step in (5, 5):
        with training_in(folder):
            pass
        assert read_end(folder) is None
        end_training(folder, step)
        assert read_end(folder) is None
        announce_ends()
        ends.append(read_end(folder))
    first, second = ends
    assert json.loads(first)["step"] == json.loads(second)["step"] == 5
    assert first != second
