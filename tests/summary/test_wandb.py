"""Tests of Weights & Biases if it is installed, and of a simulated MLflow."""

import sys
import time
import types
from pathlib import Path
from unittest.mock import Mock, call

import numpy as np
import pytest

from armillary.summary import Image, SummaryManager, WandbWriter
from tests.environment import REPOSITORY
from tests.patience import wait_until

PIXELS = np.linspace(0, 1, 12, dtype=np.float32).reshape(2, 2, 3)
RICH = {"loss": 0.5, "inner": {"first": Image(PIXELS)}}


@pytest.fixture
def wandb_runs(monkeypatch):
    runs = []

    def init(**options):
        runs.append(Mock(options=options, rows=[]))
        runs[-1].log.side_effect = runs[-1].rows.append
        return runs[-1]

    module = types.ModuleType("wandb")
    vars(module).update(init=init, Image=lambda image: image)
    monkeypatch.setitem(sys.modules, "wandb", module)
    return runs


def write_wandb(tmp_path, **options):
    """Writes like a program: training and evaluation in directories of their own."""
    writer_fn = WandbWriter(tmp_path, **options)
    train = SummaryManager(tmp_path / "train", writer_fn=writer_fn)
    evaluation = SummaryManager(tmp_path / "eval", writer_fn=[writer_fn])
    train.write_hyperparameters({"rate": 0.1, "optimizer": {"name": "adam"}})
    train.write_summaries({"loss": 0.1, "speed": 2.0}, step=10)
    train.flush()
    evaluation.write_summaries({"set": {"loss": 3.0}}, step=10)
    evaluation.write_summaries({"first": Image(PIXELS)}, step=20)
    train.close()
    evaluation.close()


def test_wandb_gets_one_run_with_names_of_directories(tmp_path, wandb_runs):
    for directory in (tmp_path, tmp_path, tmp_path / "another"):
        write_wandb(directory, project="digits")

    run, again, other = wandb_runs
    assert run.options["id"] == again.options["id"] != other.options["id"]
    assert again.options["resume"] == "allow"
    image = run.rows.pop()["eval/first"]
    np.testing.assert_array_equal(np.asarray(image), np.round(PIXELS * 255))
    assert run.options["project"] == "digits"
    assert run.options["dir"] == str(tmp_path)
    assert run.define_metric.call_args_list == [
        call("global_step"),
        call("*", step_metric="global_step"),
    ]
    assert run.rows == [
        {"train/loss": 0.1, "train/speed": 2.0, "global_step": 10},
        {"eval/set/loss": 3.0, "global_step": 10},
    ]
    run.config.update.assert_called_once_with(
        {"rate": 0.1, "optimizer/name": "adam"}, allow_val_change=True
    )
    run.finish.assert_called_once_with()


def test_summaries_must_be_in_the_directory_of_the_run(tmp_path, wandb_runs):
    manager = SummaryManager(tmp_path, writer_fn=WandbWriter(tmp_path / "run"))
    with pytest.raises(ValueError, match="is not in the subpath of"):
        manager.write_summaries({"loss": 1.0}, step=1)


def test_a_missing_package_is_an_error_with_its_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ImportError, match=r"Weights & Biases is .*\.\[wandb\]"):
        WandbWriter(tmp_path)


def test_the_recipe_for_mlflow_writes_to_one_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    client = Mock()
    client.create_run.return_value.info.run_id = "abc"
    module = types.ModuleType("mlflow")
    vars(module).update(MlflowClient=lambda: client)
    monkeypatch.setitem(sys.modules, "mlflow", module)
    text = Path(REPOSITORY, "docs", "recipes", "logging.md").read_text()
    blocks = [each.split("```")[0] for each in text.split("```python no-run\n")]
    (program,) = [each for each in blocks if "import mlflow" in each]
    names = {}
    exec(program, names)
    for step in (1, 2):
        writer_fn = names["make_mlflow_writer"](tmp_path)
        manager = SummaryManager(tmp_path / "train", writer_fn=writer_fn)
        manager.write_summaries({"loss": 0.5}, step=step)
        manager.close()
    client.create_run.assert_called_once()
    assert client.log_metric.call_args_list == [
        call("abc", "train/loss", 0.5, step=step, synchronous=False) for step in (1, 2)
    ]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_wandb_itself_keeps_one_run_offline(tmp_path, monkeypatch):
    reason = "Needs `pip install '.[wandb]'`"
    wandb = pytest.importorskip("wandb", reason=reason)
    monkeypatch.setenv("WANDB_MODE", "offline")
    settings = wandb.Settings(silent=True, disable_git=True)

    def write(step):
        writer_fn = WandbWriter(tmp_path, project="digits", settings=settings)
        manager = SummaryManager(tmp_path / "train", writer_fn=writer_fn)
        manager.write_hyperparameters({"rate": 0.1})
        manager.write_summaries({**RICH, "bad": float("nan")}, step=step)
        manager.close()

    write(20)
    time.sleep(1.1)  # Offline, it names attempts by the second.
    write(10)

    # Their format is a log of LevelDB, in which names and values are plain text.
    files = sorted(tmp_path.glob("wandb/offline-run-*/run-*.wandb"))
    assert len(files) == 2
    assert len({file.name for file in files}) == 1
    # A process of its own writes the files.
    wait_until(lambda: all(b"train/inner/first" in file.read_bytes() for file in files))
    assert all(b"train/loss" in file.read_bytes() for file in files)
