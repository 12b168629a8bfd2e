"""Tests of event files, with the reader of TensorBoard itself."""

import math
import subprocess
import sys
from pathlib import Path

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


def test_tensorboard_reads_values_that_are_not_finite(tmp_path: Path) -> None:
    writer = TensorBoardWriter(tmp_path)
    writer.scalar("nan", math.nan, 1)
    writer.scalar("inf", math.inf, 1)
    writer.close()

    scalars = read_scalars(tmp_path)
    assert math.isnan(scalars["nan"][0][1])
    assert scalars["inf"] == [(1, math.inf)]


def test_large_steps_are_kept(tmp_path: Path) -> None:
    writer = TensorBoardWriter(tmp_path)
    writer.scalar("x", 1.0, 2**40)
    writer.close()

    assert read_scalars(tmp_path) == {"x": [(2**40, 1.0)]}


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


def test_two_managers_share_a_directory(tmp_path: Path) -> None:
    first, second = SummaryManager(tmp_path), SummaryManager(tmp_path)
    first.write_summaries({"a": 1.0}, step=1)
    second.write_summaries({"b": 2.0}, step=1)
    first.close()
    second.close()

    points = [read_scalars(file) for file in tmp_path.iterdir()]
    assert {tag for scalars in points for tag in scalars} == {"a", "b"}


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


def test_the_tensorboard_writer_is_a_summary_writer(tmp_path: Path) -> None:
    writer = TensorBoardWriter(tmp_path / "new" / "folder")

    assert isinstance(writer, SummaryWriter)
    writer.close()


@pytest.mark.slow
def test_importing_summaries_does_not_import_tensorboardx() -> None:
    code = "import sys, armillary.summary; assert 'tensorboardX' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
