"""Tests that objects which belong to one process are not copied or pickled."""

import copy
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import armillary
from armillary.data import from_arrays
from armillary.distribute import DefaultStrategy

SOURCE = from_arrays(np.arange(16.0), batch_size=4)


class Trainer(armillary.StandardTrainer):
    """A trainer without a strategy of its own, at the top of a module for `pickle`."""

    def __init__(self):
        super().__init__(SOURCE)
        self.count = jnp.zeros(())

    def train_step(self, iterator):
        next(iterator)
        self.count = self.count + 1


class Evaluator(armillary.StandardEvaluator):
    def __init__(self):
        super().__init__(SOURCE)

    def eval_step(self, iterator):
        next(iterator)


class Reduced(armillary.OneDeviceStrategy):
    """A strategy of a user's, who says how it is pickled."""

    def __reduce__(self):
        return Reduced, ("cpu:0",)


def make_used_dataset():
    dataset = DefaultStrategy().distribute_dataset(SOURCE)
    next(iter(dataset))
    return dataset


def make_used_trainer():
    trainer = Trainer()
    trainer.train(2)
    return trainer


def make_used_evaluator():
    evaluator = Evaluator()
    evaluator.evaluate(-1)
    return evaluator


def make_checkpoint():
    return armillary.Checkpoint(weights={"w": jnp.zeros(1)})


def make_controller():
    trainer = Trainer()
    return armillary.Controller(
        trainer=trainer, global_step=lambda: 0, steps_per_loop=1
    )


def count_one(state):
    return state + 1, {}


def make_step_trainer():
    return armillary.StepTrainer(count_one, jnp.zeros(()), strategy=DefaultStrategy())


NEVER = {
    "DefaultStrategy": (DefaultStrategy, "`DefaultStrategy` .*`Checkpoint`"),
    "MirroredStrategy": (
        lambda: armillary.MirroredStrategy(jax.devices()[:2]),
        "`MirroredStrategy` .*in the process that uses",
    ),
    "ShardedStrategy": (armillary.ShardedStrategy, "`ShardedStrategy` "),
    "DistributedDataset": (make_used_dataset, "`DistributedDataset` .*`strategy.dist"),
    "Trainer": (make_used_trainer, "A trainer or an evaluator that has run .*`nnx.cl"),
    "Evaluator": (make_used_evaluator, "A trainer or an evaluator that has run "),
    "StepTrainer": (make_step_trainer, "`DefaultStrategy` .*trainers that hold it"),
    "Checkpoint": (make_checkpoint, "`Checkpoint` .*`checkpoint.read"),
    "Controller": (make_controller, "`Controller` .*hyperparameters"),
}
WAYS = {"deepcopy": copy.deepcopy, "pickle": pickle.dumps}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", NEVER)
def test_copies_that_cannot_work_say_what_to_do(kind, way):
    make, message = NEVER[kind]
    made = make()
    with pytest.raises(TypeError, match=message):
        WAYS[way](made)
    shallow = copy.copy(made)
    assert type(shallow) is type(made)
    assert vars(shallow) == vars(made)


@pytest.mark.parametrize("way", WAYS)
def test_the_error_of_a_copied_manager_names_the_fix(way, tmp_path):
    manager = armillary.CheckpointManager(make_checkpoint(), tmp_path)
    with pytest.raises(TypeError, match=r"`CheckpointManager` .*Make a new"):
        WAYS[way](manager)


def test_copies_that_work_are_copies():
    trainer = Trainer()
    for other in (copy.deepcopy(trainer), pickle.loads(pickle.dumps(trainer))):
        other.train(3)
        assert (other.count, trainer.count) == (3, 0)

    dataset = armillary.MirroredStrategy(jax.devices()[:2]).distribute_dataset(SOURCE)
    other = copy.deepcopy(dataset)
    assert len(list(other)) == 4
    assert dataset.get_state()["source"] is None

    options = armillary.StandardTrainerOptions(steps_per_chunk=3)
    for value in (SOURCE, options, armillary.data.InputOptions()):
        assert type(copy.deepcopy(value)) is type(value)
        pickle.loads(pickle.dumps(value))


def test_the_error_of_a_pickled_dataset_names_the_fix():
    dataset = DefaultStrategy().distribute_dataset(SOURCE)
    with pytest.raises(TypeError, match=r"`DistributedDataset` .*distribute_dataset"):
        pickle.dumps(dataset)


def test_a_class_that_defines_its_pickling_is_pickled_this_way():
    strategy = Reduced("cpu:0")
    for other in (copy.deepcopy(strategy), pickle.loads(pickle.dumps(strategy))):
        assert type(other) is Reduced
