"""Tests of saves to a full disk, simulated by a limit on the size of files."""

import os
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import armillary
from armillary.checkpoint import (
    Checkpoint,
    CheckpointManager,
    _commit,
    _folder,
    _writer,
)
from armillary.errors import CheckpointError

# Orbax closes its event loop at the first array that fails, and TensorStore calls it
# for the next one.
pytestmark = pytest.mark.filterwarnings(
    r"ignore:(?s)Exception ignored in.*Event loop is closed"
    ":pytest.PytestUnraisableExceptionWarning"
)

SHAPE = (100, 1000)


class Run(armillary.AbstractTrainer):
    """Trains a large array, and reports each loop to a function."""

    def __init__(self, after_loop: Callable[[int], None] = lambda _: None) -> None:
        self.after_loop = after_loop
        self.step = 0
        self.array = jax.random.normal(jax.random.key(0), SHAPE)

    def train(self, num_steps: int) -> None:
        self.step += num_steps
        self.array = jax.random.normal(jax.random.key(self.step), SHAPE)
        self.after_loop(self.step)


def make_manager(run: Run, directory: Path, **kwargs: object) -> CheckpointManager:
    return CheckpointManager(Checkpoint(run=run), directory, **kwargs)


def make_controller(run: Run, manager: CheckpointManager) -> armillary.Controller:
    return armillary.Controller(
        trainer=run,
        global_step=lambda: run.step,
        steps_per_loop=1,
        checkpoint_manager=manager,
    )


def limit_files(num_bytes: int) -> None:
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))


def test_a_full_disk_is_an_error_costs_no_checkpoint_and_may_be_survived(
    tmp_path, capfd
):
    def after_loop(step: int) -> None:
        manager.sync()
        if step == 3:
            limit_files(100_000)

    run = Run(after_loop)
    manager = make_manager(run, tmp_path, checkpoint_interval=1)
    controller = make_controller(run, manager)
    try:
        with pytest.raises(
            CheckpointError,
            match=r"(?s)Saving `.*/checkpoint_3` failed: .*File too large.*"
            r"earlier checkpoints are unchanged\. Make room",
        ):
            controller.train(9)
    finally:
        limit_files(resource.RLIM_INFINITY)

    # A save fails in the background, and training stops at the next chance.
    assert run.step == 4
    saved = {name for name in os.listdir(tmp_path) if name.startswith("checkpoint")}
    assert saved == {"checkpoint_1", "checkpoint_2"}
    assert "Traceback" not in capfd.readouterr().err
    for number, last in ((2, None), (6, 6)):
        if last is not None:
            controller.train(last)
            manager.close()
        other = Run()
        make_manager(other, tmp_path).restore_or_initialize()
        expected = jax.random.normal(jax.random.key(number), SHAPE)
        np.testing.assert_array_equal(other.array, expected)


@pytest.mark.parametrize("place", ["copy", "write", "wait"])
def test_a_save_that_failed_is_raised_once_and_tried_again(
    tmp_path, monkeypatch, place
):
    write: Callable[..., Any] = _writer.write_folder

    def fail(*args: object, **kwargs: object) -> None:
        raise OSError("No space left on device")

    def write_and_fail(*args: object, **kwargs: object) -> Callable[[], None]:
        wait = write(*args, **kwargs)
        return lambda: fail(wait())

    run = Run()
    manager = make_manager(run, tmp_path)
    controller = make_controller(run, manager)
    with monkeypatch.context() as patch:
        if place == "copy":
            patch.setattr(_commit, "as_stored", fail)
        else:
            replacement = fail if place == "write" else write_and_fail
            patch.setattr(_writer, "write_folder", replacement)
        with pytest.raises(CheckpointError, match="0` failed: OSError: No space left"):
            controller.save_checkpoint()

    assert not manager.has_saved_step()
    assert controller.save_checkpoint() in manager.checkpoints
    assert manager.has_saved_step()
    manager.close()


def test_old_checkpoints_that_cannot_be_removed_are_no_failed_save(
    tmp_path, monkeypatch, caplog
):
    def fail(_: object) -> None:
        raise PermissionError("Operation not permitted")

    manager = make_manager(Run(), tmp_path, max_to_keep=1)
    manager.save(1)
    manager.sync()
    monkeypatch.setattr(_folder, "remove", fail)
    manager.save(2)
    manager.sync()

    assert "checkpoint_1` cannot be removed: Operation not permitted" in caplog.text
    assert len(manager.checkpoints) == 2
