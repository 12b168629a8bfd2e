"""Tests of training runs that continue from snapshots in memory, in one process."""

from pathlib import Path

import pytest

import armillary
from armillary.checkpoint import Checkpoint, CheckpointManager
from tests.checkpoint import soak_program as program
from tests.checkpoint.memory import find_files

STEPS = 24


class Stop(Exception):  # noqa: N818
    pass


def make_run(
    tmp_path: Path, stop_at: int | None = None, checkpoint_interval: int = 8, **options
) -> tuple[program.Trainer, armillary.Controller]:
    """Makes a training that waits for each snapshot, and fails from a step on."""
    trainer = program.Trainer(armillary.OneDeviceStrategy("cpu:0"), STEPS)
    manager = CheckpointManager(
        Checkpoint(trainer=trainer, data=trainer.train_dataset),
        tmp_path / "run",
        checkpoint_interval=checkpoint_interval,
        **options,
    )
    assert (manager.memory is not None) == bool(options)

    def act(_: object) -> None:
        if manager.memory is not None:
            manager.memory.sync()
        if stop_at is not None and int(trainer.optimizer.step[...]) >= stop_at:
            raise Stop

    return trainer, program.make_controller(trainer, manager, train_actions=[act])


def train(
    tmp_path: Path, stop_at: int | None = None, **options
) -> tuple[int, dict[str, object]]:
    """Trains up to a step, or fails before.

    Returns:
        The step at the start, and the final state.
    """
    trainer, controller = make_run(tmp_path, stop_at, **options)
    start = int(trainer.optimizer.step[...])
    controller.train(STEPS)
    return start, program.describe(trainer)


def test_a_run_continues_from_memory_bit_for_bit(tmp_path, memory):
    _, expected = train(tmp_path / "whole")
    options = {"memory_interval_seconds": 1e-9, "memory_directory": memory}

    with pytest.raises(Stop):
        train(tmp_path, stop_at=20, **options)
    start, found = train(tmp_path, **options)

    # The last save on the disk was at step 12, and the last snapshot at step 16.
    assert start == 16
    assert found == expected
    # The disk has the last step.
    assert find_files(memory) == []


def test_values_before_the_first_loop_are_not_kept(tmp_path, memory):
    options = {"memory_interval_seconds": 1e-9, "memory_directory": memory}
    with pytest.raises(Stop):
        train(tmp_path, stop_at=16)

    with pytest.raises(Stop):
        train(tmp_path, stop_at=0, **options)

    # The launcher would not find that the same checkpoint has failed again.
    assert find_files(memory) == []


def test_values_before_the_first_loop_after_a_restore_are_not_kept(tmp_path, memory):
    options = {"memory_interval_seconds": 1e-9, "memory_directory": memory}
    _, controller = make_run(tmp_path, stop_at=12, **options)
    controller.train(8)
    controller.restore_checkpoint()

    with pytest.raises(Stop):
        controller.train(STEPS)

    assert find_files(memory) == []


def test_two_trainings_in_one_program_continue_from_memory(tmp_path, memory):
    _, expected = train(tmp_path / "whole")
    options = {"memory_interval_seconds": 1e-9, "memory_directory": memory}
    _, controller = make_run(tmp_path, stop_at=20, checkpoint_interval=100, **options)
    controller.train(8)
    with pytest.raises(Stop):
        controller.train(STEPS)

    start, found = train(tmp_path, **options)

    assert start == 16
    assert found == expected
