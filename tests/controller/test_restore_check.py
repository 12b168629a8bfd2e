"""Tests of the warning about a resumed run that would differ."""

import logging

import numpy as np
import optax
import pytest
from flax import nnx

import armillary
from armillary.data import from_arrays


class Trainer(armillary.StandardTrainer):
    def __init__(self, dataset):
        super().__init__(dataset)
        self.model = nnx.Linear(1, 1, rngs=nnx.Rngs(0))
        self.optimizer = nnx.Optimizer(self.model, optax.sgd(0.1), wrt=nnx.Param)

    def train_step(self, iterator):
        batch = next(iterator)
        gradients = nnx.grad(lambda model: (model(batch["x"]) ** 2).mean())(self.model)
        self.optimizer.update(self.model, gradients)


@pytest.fixture
def resume(tmp_path, caplog):
    """Returns a function that trains twice, and returns what was warned of."""

    def run(make_objects, *, distributed: bool) -> str:
        for _ in range(2):
            source = from_arrays({"x": np.ones((8, 1), "f")}, batch_size=4, repeat=True)
            strategy = armillary.OneDeviceStrategy("cpu:0")
            dataset = strategy.distribute_dataset(source) if distributed else source
            trainer = Trainer(dataset)
            objects = make_objects(trainer, dataset)
            with caplog.at_level(logging.WARNING, "armillary"):
                controller = armillary.Controller(
                    trainer=trainer,
                    global_step=trainer.optimizer.step,
                    steps_per_loop=2,
                    strategy=strategy,
                    checkpoint_manager=armillary.CheckpointManager(
                        armillary.Checkpoint(**objects), tmp_path
                    ),
                )
            controller.train(2)
        return caplog.text

    return run


def test_a_complete_checkpoint_is_no_reason_to_warn(resume):
    def hold(trainer, dataset):
        return {"trainer": trainer, "data": dataset}

    assert resume(hold, distributed=True) == ""


@pytest.mark.parametrize("distributed", [False, True])
def test_a_trainer_holds_the_position(resume, distributed):
    message = resume(lambda trainer, _: {"trainer": trainer}, distributed=distributed)
    assert message == ""


@pytest.mark.parametrize("distributed", [False, True])
def test_a_position_that_is_not_saved_is_warned_of_once(resume, distributed):
    def hold(trainer, _):
        return {"model": trainer.model, "optimizer": trainer.optimizer}

    message = resume(hold, distributed=distributed)
    assert message.count("the position of the training data is not in it") == 1
    assert "checkpoint_2 was restored" in message


def test_steps_that_are_not_saved_are_warned_of(resume):
    message = resume(
        lambda trainer, dataset: {"model": trainer.model, "data": dataset},
        distributed=True,
    )
    assert message.count("the global step is still 0") == 1
