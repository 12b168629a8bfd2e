"""Weights & Biases and MLflow: with themselves if installed, and with stand-ins."""

import sys
import time
import types
from pathlib import Path
from unittest.mock import Mock, call

import numpy as np
import pytest

from armillary.summary import Image, MlflowWriter, SummaryManager, WandbWriter

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
    with pytest.raises(ImportError, match=r"Weights & Biases is .*armillary\[wandb\]"):
        WandbWriter(tmp_path)


class MlflowException(Exception):  # noqa: N818
    """As MLflow's."""


@pytest.fixture
def mlflow_client(monkeypatch):
    """Returns a client that keeps what it is given."""
    client = Mock()
    client.get_experiment_by_name.return_value = None
    client.create_run.return_value.info.run_id = "abc"
    client.metrics = []

    def log_batch(run_id, metrics=(), params=()):
        client.metrics += [(run_id, *metric) for metric in metrics]
        client.params = params

    client.log_batch.side_effect = log_batch
    modules = {
        "tracking": {"MlflowClient": Mock(return_value=client)},
        "entities": {
            "Metric": lambda name, value, time, step: (name, value, step),
            "Param": lambda *pair: pair,
        },
        "exceptions": {"MlflowException": MlflowException},
    }
    for name, content in modules.items():
        module = types.ModuleType(f"mlflow.{name}")
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, f"mlflow.{name}", module)
    monkeypatch.setitem(sys.modules, "mlflow", types.ModuleType("mlflow"))
    return client


def test_mlflow_gets_one_run_and_goes_on_with_it(tmp_path, mlflow_client):
    for step in (10, 20):
        writer_fn = MlflowWriter(tmp_path, "digits")
        train = SummaryManager(tmp_path / "train", writer_fn=writer_fn)
        evaluation = SummaryManager(tmp_path / "eval", writer_fn=writer_fn)
        train.write_summaries({"loss (mean)": 1 / step}, step=step)
        evaluation.write_summaries({"loss": 3.0}, step=step)
        train.close()
        evaluation.close()

    assert mlflow_client.create_run.call_count == 1
    assert mlflow_client.metrics == [
        ("abc", "train/loss _mean_", 0.1, 10),
        ("abc", "eval/loss", 3.0, 10),
        ("abc", "train/loss _mean_", 0.05, 20),
        ("abc", "eval/loss", 3.0, 20),
    ]
    mlflow_client.update_run.assert_called_with("abc", status="RUNNING")
    assert mlflow_client.set_terminated.call_count == 2


def test_training_goes_on_without_the_server(
    tmp_path, mlflow_client, caplog, monkeypatch
):
    clock = Mock(return_value=1000.0)
    monkeypatch.setattr("armillary.summary._services.time.monotonic", clock)
    manager = SummaryManager(tmp_path, writer_fn=MlflowWriter(tmp_path))
    log_batch = mlflow_client.log_batch.side_effect
    mlflow_client.log_batch.side_effect = MlflowException("no route")
    manager.write_hyperparameters({"rate": 0.1})
    manager.write_summaries({"loss": 0.5}, step=1)
    for _ in range(3):
        manager.flush()
    assert mlflow_client.log_batch.call_count == 2
    assert caplog.messages == ["MLflow has not taken what it was sent: no route"] * 2

    clock.return_value += 601
    mlflow_client.log_batch.side_effect = log_batch
    mlflow_client.set_terminated.side_effect = MlflowException("no route")
    manager.flush()
    assert mlflow_client.metrics == [("abc", "loss", 0.5, 1)]
    manager.close()


def import_real(name, extra):
    return pytest.importorskip(name, reason=f'Needs `pip install "armillary[{extra}]"`')


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_wandb_itself_keeps_one_run_offline(tmp_path, monkeypatch):
    wandb = import_real("wandb", "wandb")
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
    deadline = time.monotonic() + 20
    # A process of its own writes the files.
    while not all(b"train/inner/first" in file.read_bytes() for file in files):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert all(b"train/loss" in file.read_bytes() for file in files)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_mlflow_itself_keeps_one_run(tmp_path, monkeypatch):
    tracking = import_real("mlflow.tracking", "mlflow")
    # Runs in files need this, and runs in a data base more of MLflow.
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    uri = (tmp_path / "store").as_uri()

    def write(step):
        writer_fn = MlflowWriter(tmp_path / "run", "digits", tracking_uri=uri)
        manager = SummaryManager(tmp_path / "run" / "train", writer_fn=writer_fn)
        manager.write_hyperparameters({"rate": 0.1})
        manager.write_summaries({**RICH, "bad": float("nan")}, step=step)
        manager.close()

    write(20)
    write(10)

    client = tracking.MlflowClient(tracking_uri=uri)
    experiment = client.get_experiment_by_name("digits")
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.status == "FINISHED"
    assert run.data.params == {"rate": "0.1"}
    history = client.get_metric_history(run.info.run_id, "train/loss")
    assert sorted((each.step, each.value) for each in history) == [(10, 0.5), (20, 0.5)]
    folder = Path(client.download_artifacts(run.info.run_id, "", str(tmp_path)))
    image = (folder / "images/train/inner/first/10.png").read_bytes()
    assert image.startswith(b"\x89PNG")
