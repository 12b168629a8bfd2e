"""Two recorded runs: one with a crash, and a shorter one for comparison."""

import json

import pytest

from armillary.goodput import Category
from armillary.goodput._journal import Entry
from tests.goodput.conftest import write_entries

MODULES = [
    {"name": "Dense", "count": 30, "bytes": 120},
    {"name": "<Norm>", "count": 4, "bytes": 16},
]


def write_lines(path, records):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def make_start(time, step, **config):
    return {
        "record": "start",
        "time": time,
        "step": step,
        "jax": "0.10.2",
        "command": ["python", "train.py"],
        "config": config,
        "parameters": {"count": 34, "bytes": 136, "modules": MODULES},
    }


def make_train(time, step, loss):
    values = {"loss": loss, "lr": 0.1}
    fields = {"time": time, "step": step, "steps_per_second": 4.0, "values": values}
    return {"record": "train", **fields}


def make_eval(time, step, name, **values):
    fields = {"name": name, "time": time, "step": step, "values": values}
    return {"record": "eval", **fields}


def make_checkpoint(folder, number):
    path = folder / f"checkpoint_{number}"
    (path / "manifest").mkdir(parents=True)
    header = {
        "format": "armillary-checkpoint",
        "version": 2,
        "number": number,
        "serial": number,
        "saved_at": 1000.0 + number,
        "preserved_at": 1000.0,
        "has_arrays": False,
    }
    (path / "header").mkdir()
    (path / "header" / "header.json").write_text(json.dumps(header))


def write_journal(folder, lines, *, is_done):
    entries = [
        Entry(attempt, "loop", time, step, is_done and index == len(lines), seconds)
        for index, (attempt, time, step, seconds) in enumerate(lines, start=1)
    ]
    write_entries(folder, *entries)


@pytest.fixture
def crashed(tmp_path):
    """Trained to step 30, went on from 20 after a crash, and ended at 40."""
    run = tmp_path / "runs" / "crashed"
    write_lines(
        run / "train" / "metrics.jsonl",
        [
            make_start(1000.0, 0, rate=0.1, layers=[2]),
            make_train(1010.0, 10, 1.0),
            make_train(1020.0, 20, float("inf")).copy()
            | {"values": {"loss": "Infinity", "lr": 0.1}},
            make_train(1030.0, 30, 9.0),
            make_start(1050.0, 20, rate=0.1, layers=[2, 3]),
            make_train(1060.0, 30, 0.5),
            make_train(1070.0, 40, 0.25),
        ],
    )
    write_lines(
        run / "eval" / "metrics.jsonl",
        [
            make_eval(1021.0, 20, "", loss=0.9),
            make_eval(1022.0, 20, "test", accuracy=0.5),
            make_eval(1071.0, 40, "", loss=0.3),
        ],
    )
    start, step = Category.START_UP, Category.STEPPING
    lines = [
        ("a", 1010.0, 10, {start: 10.0}),
        ("a", 1020.0, 20, {start: 10.0, step: 10.0}),
        ("a", 1030.0, 30, {start: 10.0, step: 20.0}),
        ("b", 1050.0, 20, {start: 5.0}),
        ("b", 1070.0, 40, {start: 5.0, step: 20.0}),
    ]
    write_journal(run / "checkpoints", lines, is_done=True)
    for number in (20, 30, 40):
        make_checkpoint(run / "checkpoints", number)
    return run


@pytest.fixture
def short(tmp_path):
    """Writes a run with summaries only, and different hyperparameters."""
    run = tmp_path / "runs" / "sweep" / "short"
    records = [make_start(2000.0, 0, rate=0.2, layers=[2, 3])]
    records += [make_train(2000.0 + step, step, 1 / step) for step in range(1, 4)]
    write_lines(run / "metrics.jsonl", records)
    return run
