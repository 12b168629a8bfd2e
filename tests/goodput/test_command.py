"""`armillary goodput`: what it prints, and what each mistake says."""

import json

import pytest

from armillary import _cli
from armillary.goodput import Category
from armillary.goodput._journal import Entry, Journal


@pytest.fixture
def run_dir(tmp_path):
    journal = Journal(tmp_path / "run")
    for attempt, time, step, seconds in [
        ("a", 1010.0, 0, {Category.START_UP: 10.0}),
        ("a", 1060.0, 40, {Category.START_UP: 10.0, Category.STEPPING: 50.0}),
        ("a", 1070.0, 48, {Category.START_UP: 10.0, Category.STEPPING: 60.0}),
        ("b", 1080.0, 40, {Category.RESTORING: 5.0}),
        ("b", 1100.0, 41, {Category.RESTORING: 5.0, Category.STEPPING: 20.0}),
    ]:
        journal.append(
            Entry(
                attempt=attempt,
                event="loop",
                time=time,
                step=step,
                is_done=False,
                seconds=seconds,
            )
        )
    return tmp_path / "run"


def test_table(run_dir, capsys):
    assert _cli.main(["goodput", str(run_dir)]) == 0

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
    assert "goodput 70.0%, 2 attempts, 41 steps, 8 steps lost\n" in printed


def test_lines_that_cannot_be_read_are_told(run_dir, capsys):
    with open(run_dir / "goodput.jsonl", "a") as file:
        file.write('{"format": "arm')

    assert _cli.main(["goodput", str(run_dir)]) == 0

    printed = capsys.readouterr().out
    assert "Lines that could not be read, as a crash or a full disk" in printed
    assert printed.rstrip().endswith("6.")


def test_json(run_dir, capsys):
    assert _cli.main(["goodput", "--json", str(run_dir.parent)]) == 0

    record = json.loads(capsys.readouterr().out)
    seconds = record.pop("seconds")
    assert record == {
        "goodput": 0.7,
        "total_seconds": 100.0,
        "attempts": 2,
        "steps": 41,
        "lost_steps": 8,
        "unreadable_lines": [],
    }
    assert set(seconds) == {str(category) for category in Category}
    assert seconds["stepping"] == 70.0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "the following arguments are required: RUN_DIR"),
        (["nowhere"], "`run_dir` is 'nowhere', which does not exist, but it must be"),
        (["."], "`run_dir` is '.', but there is no `goodput.jsonl` in it"),
    ],
)
def test_mistakes_are_explained(words, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)

    with pytest.raises(SystemExit) as raised:
        _cli.main(["goodput", *words])

    assert raised.value.code == 2
    assert message in " ".join(capsys.readouterr().err.split())
