"""Tests of checkpoints under `ShardedStrategy`: other strategies can read them."""

import pytest

import armillary
from armillary import ShardedStrategy
from tests.distribute.sharded_trainers import (
    CUBE,
    FIRST_RULES,
    MAKERS,
    RULES,
    Linear,
    make_trainer,
    specs_of,
)
from tests.problems import (
    assert_identical,
    read_state,
)
from tests.tiers import slow_after_first


def save_and_restore(folder, source, target):
    parts = [
        {"model": trainer.model, "optimizer": trainer.optimizer}
        for trainer in (source, target)
    ]
    managers = [
        armillary.CheckpointManager(armillary.Checkpoint(**objects), str(folder))
        for objects in parts
    ]
    managers[0].save()
    managers[0].sync()
    managers[1].restore_or_initialize()
    assert_identical(read_state(parts[1]), read_state(parts[0]))


@slow_after_first("has_trained", [False, True])
def test_checkpoints_move_between_strategies_bit_for_bit(tmp_path, has_trained):
    order = ["one device", "fsdp", "mirrored", "cube", "one device"]
    makers = {**MAKERS, "cube": lambda: ShardedStrategy(CUBE, FIRST_RULES)}
    trainers = {name: Linear(makers[name]()) for name in order}
    for number, trainer in enumerate(trainers.values(), start=1):
        if has_trained or number == 1:
            trainer.train(number)
    for number in range(len(order) - 1):
        source, target = (trainers[name] for name in order[number : number + 2])
        save_and_restore(tmp_path / str(number), source, target)
        target.train(1)
        if order[number + 1] in ("fsdp", "cube"):
            assert specs_of(target.model["first"])["kernel"]


@pytest.mark.slow
@pytest.mark.usefixtures("optimized")
def test_a_resumed_run_equals_one_that_did_not_stop(tmp_path):
    def make_controller(folder):
        trainer = make_trainer(ShardedStrategy(CUBE, RULES))
        checkpoint = armillary.Checkpoint(
            trainer=trainer, train_dataset=trainer.train_dataset
        )
        return armillary.Controller(
            global_step=trainer.optimizer.step,
            trainer=trainer,
            steps_per_loop=3,
            checkpoint_manager=armillary.CheckpointManager(checkpoint, str(folder)),
        )

    whole = make_controller(tmp_path / "whole")
    whole.train(14)
    make_controller(tmp_path / "parts").train(5)
    resumed = make_controller(tmp_path / "parts")
    assert int(resumed.global_step[...]) == 5
    resumed.train(14)
    assert_identical(read_state(resumed.trainer), read_state(whole.trainer))
