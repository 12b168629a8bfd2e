"""Tests of the sums over attempts of a run, and of `armillary goodput`."""

import json

import pytest

from armillary.goodput import Category, read_goodput
from armillary.goodput._journal import add_up
from tests.command import run_command
from tests.goodput.conftest import Attempt, write_entries


def spent(goodput):
    return {str(name): value for name, value in goodput.seconds.items() if value}


def test_work_of_a_killed_attempt_after_its_last_save_is_lost():
    first = Attempt("a", 100.0, step=0).spend(1.0, Category.START_UP)
    first.spend(10.0, step=20).spend(1.0, Category.SAVING)
    first.spend(4.0, step=27).spend(1.0, Category.DATA, step=28)
    second = Attempt("b", first.time + 7.0, step=20).spend(2.0, Category.START_UP)
    second.spend(5.0, step=40, is_done=True)

    goodput = add_up([*first.entries, *second.entries])

    assert spent(goodput) == {
        "start_up": 3.0,
        "stepping": 15.0,
        "saving": 1.0,
        "lost": 5.0,
        "down": 7.0,
    }
    assert (goodput.num_attempts, goodput.num_steps) == (2, 40)
    assert goodput.num_lost_steps == 8
    assert goodput.total_seconds == pytest.approx(second.time - 100.0)


def test_going_back_far_loses_several_attempts():
    one = Attempt("a", 0.0, step=0).spend(10.0, step=10).spend(10.0, step=20)
    two = Attempt("b", one.time, step=20).spend(10.0, step=30)
    three = Attempt("c", two.time, step=10).spend(10.0, step=20)

    goodput = add_up([*one.entries, *two.entries, *three.entries])

    assert spent(goodput) == {"stepping": 20.0, "lost": 20.0}
    assert (goodput.num_steps, goodput.num_lost_steps) == (20, 20)


@pytest.mark.parametrize(
    ("start", "is_done"),
    [pytest.param(1e6, True, id="pause"), pytest.param(-50.0, False, id="clocks")],
)
def test_a_pause_as_planned_and_clocks_that_disagree_are_no_time(start, is_done):
    first = Attempt("a", 0.0, step=0).spend(10.0, step=10, is_done=is_done)
    second = Attempt("b", start, step=10).spend(10.0, step=20)

    assert spent(add_up([*first.entries, *second.entries])) == {"stepping": 20.0}


@pytest.fixture
def run_dir(tmp_path):
    first = Attempt("a", 1000.0, step=0).spend(10.0, Category.START_UP)
    first.spend(50.0, step=40).spend(10.0, step=48)
    second = Attempt("b", 1075.0, step=40).spend(5.0, Category.RESTORING)
    second.spend(20.0, step=41)
    write_entries(tmp_path / "run", *first.entries, *second.entries)
    return tmp_path / "run"


def test_a_run_is_found_in_its_directory_and_in_the_one_above(run_dir):
    assert read_goodput(run_dir).num_steps == 41
    assert read_goodput(str(run_dir.parent)) == read_goodput(run_dir)


def test_table(run_dir, capsys):
    assert run_command(["goodput", str(run_dir)]) == 0

    printed = capsys.readouterr().out
    rows = [
        [cell.strip() for cell in line.split("│")[1:-1]]
        for line in printed.splitlines()
        if line.startswith("│")
    ]
    assert rows == [
        ["stepping", "70.0", "70.0%"],
        ["compiling", "0.0", "0.0%"],
        ["waiting for data", "0.0", "0.0%"],
        ["saving", "0.0", "0.0%"],
        ["restoring", "5.0", "5.0%"],
        ["evaluating", "0.0", "0.0%"],
        ["start-up", "10.0", "10.0%"],
        ["actions, summaries, logging", "0.0", "0.0%"],
        ["lost: work done again", "10.0", "10.0%"],
        ["lost: down between attempts", "5.0", "5.0%"],
        ["total", "100.0", "100.0%"],
    ]
    assert printed.endswith("goodput 70.0%, 2 attempts, 41 steps, 8 steps lost\n")


def test_json(run_dir, capsys):
    assert run_command(["goodput", "--json", str(run_dir.parent)]) == 0

    record = json.loads(capsys.readouterr().out)
    seconds = record.pop("seconds")
    assert record == {
        "goodput": 0.7,
        "total_seconds": 100.0,
        "attempts": 2,
        "steps": 41,
        "lost_steps": 8,
        "stragglers": [],
    }
    assert set(seconds) == {str(category) for category in Category}
    assert seconds["stepping"] == 70.0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "the following arguments are required: RUN_DIR"),
        (["file"], "`run_dir` is 'file', but there are 0 files `goodput.jsonl`"),
        (["empty"], "`run_dir` is 'empty', but there are 0 files `goodput.jsonl`"),
        (["."], "there are 2 files `goodput.jsonl` in it or just below it, and it"),
    ],
)
def test_mistakes_are_explained(words, message, run_dir, monkeypatch, capsys):
    monkeypatch.chdir(run_dir.parent)
    run_dir.with_name("file").touch()
    run_dir.with_name("empty").mkdir()
    write_entries(run_dir.with_name("two"), *Attempt("a", 0.0, step=0).entries)

    with pytest.raises(SystemExit) as raised:
        run_command(["goodput", *words])

    assert raised.value.code == 2
    assert message in " ".join(capsys.readouterr().err.split())
