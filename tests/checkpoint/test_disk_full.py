"""Tests of saves that the kernel refuses to write."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import numpy as np
import pytest

import armillary
from armillary.checkpoint import Checkpoint, CheckpointManager, _folder
from armillary.checkpoint._store import Store
from armillary.errors import CheckpointError

# Orbax closes its event loop at the first array that fails, and TensorStore calls it
# for the next one.
pytestmark = pytest.mark.filterwarnings(
    r"ignore:(?s)Exception ignored in.*Event loop is closed"
    ":pytest.PytestUnraisableExceptionWarning"
)

# Two checkpoints of this many random numbers fit onto the small disk, three do not.
SHAPE = (100, 1000)
DISK_BYTES = 1_000_000


def list_saved(directory: Path) -> list[str]:
    """Returns all names in a directory, but for those that hold no state."""
    without = {"goodput.jsonl", "metrics.jsonl", "DONE"}
    return sorted(set(os.listdir(directory)) - without)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Returns a directory on a file system of its own, or skips the test."""
    path = tmp_path / "disk"
    path.mkdir()
    options = ["-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(path)]
    try:
        subprocess.run(["mount", *options], check=True, capture_output=True, timeout=20)
    except (OSError, subprocess.SubprocessError) as error:
        pytest.skip(f"This test needs the right to mount a small file system: {error}.")
    yield path
    subprocess.run(["umount", "-l", str(path)], check=True, timeout=20)


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


def expected_array(step: int) -> np.ndarray:
    return np.asarray(jax.random.normal(jax.random.key(step), SHAPE))


def make_manager(run: Run, directory: Path, **kwargs: object) -> CheckpointManager:
    return CheckpointManager(Checkpoint(run=run), directory, **kwargs)


def make_controller(run: Run, manager: CheckpointManager) -> armillary.Controller:
    return armillary.Controller(
        trainer=run,
        global_step=lambda: run.step,
        steps_per_loop=1,
        checkpoint_manager=manager,
    )


def test_a_full_disk_is_an_error_and_costs_no_checkpoint(
    small_disk: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = Run()
    manager = make_manager(run, small_disk / "run", checkpoint_interval=1)
    controller = make_controller(run, manager)

    with pytest.raises(
        CheckpointError,
        match=r"(?s)Saving `.*/run/checkpoint_3` failed: .*No space left on device.*"
        r"earlier checkpoints are as they were\. Make room",
    ):
        controller.train(9)

    # A save fails in the background, and training stops at the next chance.
    assert run.step == 4
    assert list_saved(small_disk / "run") == ["checkpoint_1", "checkpoint_2"]
    assert "Traceback" not in capfd.readouterr().err

    other = Run()
    again = make_manager(other, small_disk / "run")
    again.restore_or_initialize()
    np.testing.assert_array_equal(other.array, expected_array(2))
    again.close()

    shutil.rmtree(small_disk / "run" / "checkpoint_1")
    manager.save(5)
    manager.close()


def fail_in_background(patch: pytest.MonkeyPatch) -> None:
    """Has saves fail at their end."""
    wait = Store.wait

    def fail(store: Store) -> None:
        wait(store)
        raise OSError("No space left on device")

    patch.setattr(Store, "wait", fail)


PROGRAM = """
import resource, sys
from pathlib import Path
from tests.checkpoint.test_disk_full import *

def limit(num_bytes):
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))

def after_loop(step):
    try:
        manager.sync()
    finally:
        # From step 2 on, no file may become larger; from step 5 on, it may again.
        limit(10_000 if 2 <= step < 5 else resource.RLIM_INFINITY)

run = Run(after_loop)
manager = make_manager(run, Path(sys.argv[1]), checkpoint_interval=1)
controller = make_controller(run, manager)
while run.step < 6:
    try:
        controller.train(6)
    except CheckpointError as error:
        print(error)
manager.sync()
"""


def run_program(directory: Path) -> subprocess.CompletedProcess:
    repository = str(Path(__file__).resolve().parents[2])
    return subprocess.run(
        [sys.executable, "-c", PROGRAM, str(directory)],
        check=False,
        timeout=120,
        capture_output=True,
        text=True,
        cwd=repository,
        env={**os.environ, "PYTHONPATH": repository},
    )


@pytest.mark.slow
def test_a_program_that_catches_the_error_goes_on_over_refused_writes(
    tmp_path: Path,
) -> None:
    child = run_program(tmp_path)

    assert child.returncode == 0, child.stderr
    # Of the saves of steps 2 and 4, told in the loops that follow.
    assert child.stdout.count("File too large") == 2
    assert "Traceback" not in child.stderr
    assert list_saved(tmp_path) == ["checkpoint_1", "checkpoint_6"]
    other = Run()
    assert make_manager(other, tmp_path).restore_or_initialize() is not None
    np.testing.assert_array_equal(other.array, expected_array(6))


@pytest.mark.parametrize("place", ["at once", "in the background"])
def test_a_save_that_failed_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    def fail(*args: object) -> None:
        raise OSError("No space left on device")

    run = Run()
    manager = make_manager(run, tmp_path)
    controller = make_controller(run, manager)
    with monkeypatch.context() as patch:
        if place == "at once":
            patch.setattr("armillary.checkpoint._writer.as_stored", fail)
        else:
            fail_in_background(patch)
        with pytest.raises(CheckpointError, match="No space left on device"):
            controller.save_checkpoint()

    assert not manager.has_saved_step()
    assert controller.save_checkpoint() in manager.checkpoints
    assert manager.has_saved_step()
    manager.close()


def test_old_checkpoints_that_cannot_be_removed_are_no_failed_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
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
