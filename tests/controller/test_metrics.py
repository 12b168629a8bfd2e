"""Tests of the records of a run that a controller writes to `metrics.jsonl`."""

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

import armillary
from armillary.controller._attempt import read_git
from armillary.summary import SummaryManager, read_metrics
from tests.controller.loops import make_controller


def fail(step):
    if step == 40:
        raise RuntimeError("no more memory")
    return {"loss": 1 / step}


def read_steps(directory):
    return [(record["record"], record["step"]) for record in read_metrics(directory)]


def test_loops_and_evaluations_are_records(tmp_path):
    controller = make_controller(
        lambda step: {"loss": 1 / step, "nested": {"step": step}},
        summary_dir=tmp_path / "train",
        summary_interval=20,
    )
    controller.train_and_evaluate(40, eval_interval=20)

    kinds = ("start", 0), ("train", 20), ("eval", 20), ("train", 40), ("eval", 40)
    assert read_steps(tmp_path) == list(kinds)
    _, train, evaluation, *_ = read_metrics(tmp_path)
    assert train["steps_per_second"] > 0
    assert train["values"] == {"loss": 0.05, "nested/step": 20}
    assert evaluation["seconds"] >= 0
    assert evaluation["values"] == {"accuracy": 0.2}
    assert evaluation["name"] == "" and evaluation["folder"] == "train"


def test_without_a_directory_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make_controller(hyperparameters={"rate": 0.1}).train_and_evaluate(20)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("as_path", [str, Path, lambda path: f"{path}/../run"])
def test_one_directory_in_two_spellings_is_one(tmp_path, as_path):
    folder = tmp_path / "run"
    controller = make_controller(
        summary_dir=str(folder), eval_summary_dir=as_path(folder)
    )
    assert controller.eval_summary_manager is controller.summary_manager


def test_without_summaries_the_record_is_next_to_the_checkpoints(tmp_path):
    controller = make_controller(
        directory=tmp_path / "run", summary_manager=SummaryManager(None)
    )
    controller.train_and_evaluate(10)
    assert read_steps(tmp_path / "run") == [("start", 0), ("train", 10), ("eval", 10)]


def test_evaluations_without_a_directory_are_recorded_with_the_training(tmp_path):
    controller = make_controller(
        summary_dir=tmp_path, eval_summary_manager=SummaryManager(None)
    )
    controller.train_and_evaluate(10)
    assert read_steps(tmp_path) == [("start", 0), ("train", 10), ("eval", 10)]


def test_a_job_that_only_evaluates_leaves_the_checkpoints_directory_alone(tmp_path):
    make_controller(directory=tmp_path).train(20)
    before = (tmp_path / "metrics.jsonl").read_bytes()
    options = {"trainer": None, "steps_per_loop": None}

    make_controller(directory=tmp_path, **options).evaluate()
    make_controller(
        directory=tmp_path, eval_summary_dir=tmp_path / "test", **options
    ).evaluate()

    assert (tmp_path / "metrics.jsonl").read_bytes() == before
    assert read_steps(tmp_path / "test") == [("eval", 20)]


def test_a_run_that_is_resumed_has_one_curve(tmp_path):
    with pytest.raises(RuntimeError, match="no more memory"):
        make_controller(
            fail,
            directory=tmp_path / "checkpoints",
            summary_dir=tmp_path,
        ).train(60)
    restored = make_controller(directory=tmp_path / "checkpoints", summary_dir=tmp_path)
    restored.train(40)
    restored.train(60)  # It continues, so there is no new start.
    assert read_steps(tmp_path) == [
        ("start", 0),
        *(("train", step) for step in (10, 20, 30)),
        ("start", 30),
        *(("train", step) for step in (40, 50, 60)),
    ]

    restored.restore_checkpoint(restored.checkpoint_manager.checkpoints[0])
    restored.train(30)

    assert read_steps(tmp_path) == [
        ("start", 0),
        ("train", 10),
        ("train", 20),
        ("start", 30),
        ("start", 20),
        ("train", 30),
    ]


def test_evaluations_after_the_restored_step_are_left_out(tmp_path):
    controller = make_controller(
        directory=tmp_path / "checkpoints",
        summary_dir=tmp_path / "train",
        eval_summary_dir=tmp_path / "eval",
        summary_interval=20,
    )
    controller.train_and_evaluate(30, eval_interval=10)
    controller.restore_checkpoint(tmp_path / "checkpoints" / "checkpoint_20")
    controller.train(40)

    steps = read_steps(tmp_path)
    evaluated = [step for record, step in steps if record == "eval"]
    assert evaluated == [10, 20]
    assert ("start", 20) in steps


@pytest.mark.parametrize("is_of_trainer", [True, False])
def test_the_first_record_describes_the_run(tmp_path, is_of_trainer):
    config = {"rate": 0.1, "optimizer": {"name": "adam"}, "limit": float("inf")}
    strategy = armillary.MirroredStrategy(jax.devices()[:4])
    controller = make_controller(
        summary_dir=tmp_path,
        strategy=None if is_of_trainer else strategy,
        hyperparameters=config,
    )
    controller.trainer.strategy = strategy
    controller.trainer.model = {"kernel": np.ones((3, 2), "f"), "bias": np.ones(2)}
    controller.train(10)

    start = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[0])
    assert list(start)[:3] == ["record", "time", "step"]
    assert {"jax", "numpy", "python", "git"} < set(start)
    expected = {
        "record": "start",
        "step": 0,
        "armillary": armillary.__version__,
        "devices": "8 cpu",
        "strategy": "MirroredStrategy",
        "replicas": 4,
        "processes": 1,
        "command": sys.orig_argv,
        "directory": os.getcwd(),
        "config": {**config, "limit": "Infinity"},
        "parameters": {
            "count": 8,
            "bytes": 40,
            "modules": [{"name": "model", "count": 8, "bytes": 40}],
        },
    }
    assert {name: start[name] for name in expected} == expected
    (events,) = tmp_path.glob("events*")
    assert b"_hparams_" in events.read_bytes()


@pytest.fixture
def fresh_git():
    read_git.cache_clear()
    yield
    read_git.cache_clear()


def run_git(folder, *arguments):
    own = ["-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false"]
    command = ["git", *own, *arguments]
    ended = subprocess.run(command, cwd=folder, check=True, capture_output=True)
    return ended.stdout.decode().strip()


def test_the_commit_and_whether_files_have_changed(tmp_path, monkeypatch, fresh_git):
    assert read_git(tmp_path) is None
    run_git(tmp_path, "init", "--quiet")
    read_git.cache_clear()
    assert read_git(tmp_path) is None
    (tmp_path / "train.py").write_text("1")
    run_git(tmp_path, "add", ".")
    run_git(tmp_path, "commit", "--quiet", "--message", "first")
    commit = run_git(tmp_path, "rev-parse", "HEAD")

    (tmp_path / "notes").touch()  # Git does not know it.
    read_git.cache_clear()
    assert read_git(tmp_path) == {"commit": commit, "dirty": False}

    (tmp_path / "train.py").write_text("2")
    read_git.cache_clear()
    assert read_git(tmp_path) == {"commit": commit, "dirty": True}

    monkeypatch.setenv("PATH", str(tmp_path))
    read_git.cache_clear()
    assert read_git(tmp_path) is None
