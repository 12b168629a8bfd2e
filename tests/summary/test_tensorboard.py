"""Tests of event files, with the reader of TensorBoard itself."""

import dataclasses
import math
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from armillary.summary import SummaryManager, SummaryWriter, TensorBoardWriter

event_accumulator = pytest.importorskip(
    "tensorboard.backend.event_processing.event_accumulator",
    reason="These tests need TensorBoard: pip install tensorboard.",
)


def read_scalars(directory: Path) -> dict[str, list[tuple[int, float]]]:
    accumulator = event_accumulator.EventAccumulator(str(directory))
    accumulator.Reload()
    return {
        tag: [(event.step, event.value) for event in accumulator.Scalars(tag)]
        for tag in accumulator.Tags()["scalars"]
    }


def test_tensorboard_reads_separate_runs_with_the_same_tag(tmp_path: Path) -> None:
    manager = SummaryManager(tmp_path)
    for step in (100, 200):
        manager.write_summaries(
            {"train": {"loss": 2 / step}, "validation": {"loss": 1.0}, "rate": step},
            step=step,
        )
    manager.flush()

    train = read_scalars(tmp_path / "train")
    assert set(train) == {"loss"}
    assert [step for step, _ in train["loss"]] == [100, 200]
    np.testing.assert_allclose([value for _, value in train["loss"]], [0.02, 0.01])
    assert read_scalars(tmp_path / "validation") == {"loss": [(100, 1.0), (200, 1.0)]}
    assert read_scalars(tmp_path) == {"rate": [(100, 100.0), (200, 200.0)]}
    manager.close()


def test_tensorboard_reads_large_steps_and_values_that_are_not_finite(
    tmp_path: Path,
) -> None:
    writer = TensorBoardWriter(tmp_path / "new" / "folder")
    writer.scalar("nan", math.nan, 2**40)
    writer.scalar("inf", math.inf, 1)
    writer.close()

    assert isinstance(writer, SummaryWriter)
    scalars = read_scalars(tmp_path / "new" / "folder")
    [(step, nan)] = scalars["nan"]
    assert step == 2**40
    assert math.isnan(nan)
    assert scalars["inf"] == [(1, math.inf)]


def test_resuming_appends_files_and_keeps_the_old_ones(tmp_path: Path) -> None:
    for step in range(4):  # within one second, the resolution of the file names
        manager = SummaryManager(tmp_path)
        manager.write_summaries({"loss": step}, step=step)
        manager.close()

    files = list(tmp_path.iterdir())
    assert len(files) == 4
    contents = [file.read_bytes() for file in files]
    points: set[tuple[int, float]] = set()
    for file in files:
        points.update(read_scalars(file)["loss"])
    assert points == {(step, float(step)) for step in range(4)}
    assert [file.read_bytes() for file in files] == contents


@pytest.mark.slow
def test_flushed_values_survive_a_kill(tmp_path: Path) -> None:
    code = (
        "import os, signal, sys\n"
        "from armillary.summary import SummaryManager\n"
        "manager = SummaryManager(sys.argv[1])\n"
        "for step in range(50): manager.write_summaries({'x': step}, step=step)\n"
        "manager.flush()\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    child = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], check=False, timeout=60
    )

    assert child.returncode == -9
    assert len(read_scalars(tmp_path)["x"]) == 50


@dataclasses.dataclass
class Optimizer:
    name: str
    nesterov: bool


VALUES = {
    "rate": 0.1,
    "layers": 3,
    "optimizer": Optimizer("adam", True),
    "sizes": [4, 5],
    "activation": jax.nn.relu,
}
FLAT = {
    "rate": 0.1,
    "layers": 3,
    "optimizer/name": "adam",
    "optimizer/nesterov": True,
    "sizes": "[4, 5]",
    "activation": "relu",
}


def test_tensorboard_shows_hyperparameters_with_the_metrics(tmp_path):
    from tensorboard.backend.event_processing import (
        data_provider,
        plugin_event_multiplexer,
    )
    from tensorboard.context import RequestContext
    from tensorboard.plugins.base_plugin import TBContext
    from tensorboard.plugins.hparams import (
        api_pb2,
        backend_context,
        list_session_groups,
    )

    for attempt in range(2):  # A run that is resumed writes them again.
        manager = SummaryManager(tmp_path / "train")
        manager.write_hyperparameters(VALUES)
        manager.write_summaries({"loss": 0.5}, step=attempt)
        manager.close()

    multiplexer = plugin_event_multiplexer.EventMultiplexer()
    multiplexer.AddRunsFromDirectory(str(tmp_path))
    multiplexer.Reload()
    provider = data_provider.MultiplexerDataProvider(multiplexer, str(tmp_path))
    context = backend_context.Context(TBContext(data_provider=provider))
    request = api_pb2.ListSessionGroupsRequest(
        start_index=0,
        slice_size=10,
        allowed_statuses=[api_pb2.STATUS_UNKNOWN],
        col_params=[],
    )
    handler = list_session_groups.Handler(RequestContext(), context, "", request)
    (group,) = handler.run().session_groups

    shown = {
        name: getattr(value, value.WhichOneof("kind"))
        for name, value in group.hparams.items()
    }
    assert shown == FLAT
    assert [metric.name.tag for metric in group.metric_values] == ["loss"]
