"""Tests of trainers that hold weak references."""

import weakref

import jax.numpy as jnp
import pytest

import armillary
from tests.problems import Holder, make_batches


class Trainer(armillary.StandardTrainer):
    def __init__(self):
        super().__init__(make_batches(4))
        self.total, self.step = jnp.zeros(()), armillary.create_global_step()
        self.gone = weakref.proxy(Holder())
        self.several = [weakref.proxy(Holder())]

    def train_step(self, iterator):
        self.total = self.total + next(iterator)["x"].sum()
        self.step[...] += 1


def test_a_proxy_whose_object_is_gone_does_not_matter(tmp_path):
    trainer = Trainer()
    manager = armillary.CheckpointManager(
        armillary.Checkpoint(trainer=trainer), tmp_path, checkpoint_interval=2
    )
    controller = armillary.Controller(
        trainer=trainer,
        global_step=trainer.step,
        steps_per_loop=2,
        checkpoint_manager=manager,
    )

    controller.train(4)

    assert float(trainer.total) == 2 * (1 + 2 + 3 + 4)
    assert len(manager.checkpoints) == 2


def test_using_a_dead_reference_in_a_step_is_pythons_own_error():
    class Looking(Trainer):
        def train_step(self, iterator):
            next(iterator)
            self.total = self.total + self.gone.total

    with pytest.raises(ReferenceError, match="no longer exists"):
        Looking().train(1)
