"""What a recorder writes, and when."""

import itertools
import subprocess
import sys

import pytest

from armillary.goodput import Category
from armillary.goodput._goodput import add_up
from armillary.goodput._journal import Recorder, make_recorder


class ListJournal:
    """Keeps entries in a list."""

    def __init__(self):
        self.entries = []

    def append(self, entry):
        self.entries.append(entry)


@pytest.fixture
def journal():
    return ListJournal()


def run(recorder, step=0, *, reached=True):
    return recorder.run(step, lambda: reached)


def test_a_run_from_the_start_of_its_process(journal, clock):
    recorder = Recorder(journal, start_up_seconds=3.0)
    with recorder.phase(Category.RESTORING):
        clock.now += 1
    clock.now += 2
    with run(recorder, step=10):
        with recorder.phase(Category.STEPPING):
            clock.now += 20
        recorder.mark("loop", 15)
    clock.now += 1000

    assert [(entry.event, entry.step) for entry in journal.entries] == [
        ("start", 10),
        ("loop", 15),
        ("end", 15),
    ]
    assert [entry.is_done for entry in journal.entries] == [False, False, True]
    goodput = add_up(journal.entries)
    assert goodput.seconds[Category.START_UP] == 5
    assert goodput.seconds[Category.RESTORING] == 1
    assert goodput.seconds[Category.STEPPING] == 20
    assert goodput.total_seconds == 26 == sum(recorder.seconds.values())


def test_time_between_calls_is_not_counted(journal, clock):
    recorder = Recorder(journal)
    recorder.mark("evaluation", 0)
    assert journal.entries == []  # Nothing is written before training.
    with run(recorder):
        clock.now += 1
    clock.now += 1000
    with recorder.phase(Category.EVALUATING):
        clock.now += 2
    recorder.mark("evaluation", 0)
    clock.now += 1000
    with run(recorder):
        clock.now += 4

    assert add_up(journal.entries).total_seconds == 7
    assert [entry.is_done for entry in journal.entries] == [
        False,
        True,
        True,
        False,
        True,
    ]


def test_a_run_that_stops_early_or_fails_is_not_done(journal, clock):
    recorder = Recorder(journal)
    with run(recorder, reached=False):
        pass
    with pytest.raises(KeyError), run(recorder):
        raise KeyError("x")

    ends = [entry.is_done for entry in journal.entries if entry.event == "end"]
    assert ends == [False, False]
    clock.now += 1000
    assert sum(recorder.seconds.values()) == 0


def test_lines_of_loops_thin_out(journal, clock):
    recorder = Recorder(journal)
    with run(recorder):
        for step in range(1, 20_001):
            clock.now += 0.1
            recorder.mark("loop", step)

    times = [entry.time - 1000 for entry in journal.entries]
    gaps = [later - time for time, later in itertools.pairwise(times)]
    assert gaps[0] == pytest.approx(0.1)
    assert max(gaps) <= 10.2
    assert len(times) < 700


def test_lines_of_saves_are_always_written(journal, clock):
    recorder = Recorder(journal, start_up_seconds=100.0)
    with run(recorder):
        recorder.mark("loop", 1)
        recorder.mark("save", 1)
        recorder.mark("loop", 2)
        recorder.mark("restore", 1)

    events = [entry.event for entry in journal.entries]
    assert events == ["start", "save", "restore", "end"]


def test_all_that_was_done_before_going_back_is_lost(journal, clock):
    recorder = Recorder(journal)

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

    goodput = add_up(journal.entries)
    assert goodput.seconds[Category.STEPPING] == pytest.approx(13.0)
    assert goodput.seconds[Category.LOST] == pytest.approx(5.1)
    assert goodput.seconds[Category.RESTORING] == pytest.approx(1.0)
    assert (goodput.num_steps, goodput.num_lost_steps) == (14, 2)


@pytest.mark.parametrize("directory", [None, "gs://bucket/run"])
def test_without_a_local_directory_nothing_is_written(directory, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with run(make_recorder(directory)):
        pass

    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_the_first_recorder_accounts_for_the_start_of_the_process(tmp_path):
    code = (
        "import sys, time\n"
        "time.sleep(0.3)\n"
        "from armillary.goodput._journal import make_recorder\n"
        "{}"
        "print(*(sum(make_recorder(sys.argv[1]).seconds.values()) for _ in 'ab'))\n"
    )

    def measure(change):
        command = [sys.executable, "-c", code.format(change), str(tmp_path)]
        return map(float, subprocess.check_output(command, timeout=120).split())

    first, second = measure("")
    assert first > 0.3
    assert second < 0.1
    # At a prompt, time goes to thinking.
    assert next(measure("sys.ps1 = '>>> '\n")) < 0.1
