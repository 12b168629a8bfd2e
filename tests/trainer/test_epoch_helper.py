"""Epochs begin and end at loops, by the global step, in a trainer and by hand."""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import armillary
from armillary.data import from_arrays
from tests.mistakes import mistakes


class Counter:
    value = 0

    def __call__(self):
        return self.value


def follow(helper, step, values):
    """Returns what each loop that ends at a step of `values` says."""
    said = []
    for value in values:
        begins = helper.epoch_begin()
        step.value = value
        said.append((begins, helper.batch_index, helper.epoch_end()))
    return said


def test_an_epoch_lasts_for_several_loops():
    step = Counter()
    helper = armillary.EpochHelper(4, step)
    assert helper.current_epoch is None
    assert follow(helper, step, [2, 4, 6, 8]) == [
        (True, 2, False),
        (False, 4, True),
        (True, 2, False),
        (False, 4, True),
    ]
    assert helper.current_epoch == 1


def test_an_epoch_that_loops_do_not_divide_ends_late():
    step = Counter()
    helper = armillary.EpochHelper(4, step)
    ends = [end for _, _, end in follow(helper, step, [3, 6, 9, 12])]
    assert ends == [False, True, True, True]


def test_a_restart_goes_on_inside_the_epoch():
    step = Counter()
    step.value = 6
    helper = armillary.EpochHelper(4, step)
    assert helper.epoch_begin()
    assert (helper.current_epoch, helper.batch_index) == (1, 2)


class Trainer(armillary.StandardTrainer):
    def __init__(self, log):
        data = {"x": np.arange(8, dtype="float32")}
        super().__init__(from_arrays(data, batch_size=1, repeat=True))
        self.step = armillary.create_global_step()
        self.total = nnx.Variable(jnp.zeros(()))
        self.epochs = armillary.EpochHelper(4, self.step)
        self.log = log

    def train_loop_begin(self):
        if self.epochs.epoch_begin():
            self.total.set_value(jnp.zeros(()))

    def train_step(self, iterator):
        self.total.set_value(self.total.get_value() + next(iterator)["x"][0])
        self.step.set_value(self.step.get_value() + 1)

    def train_loop_end(self):
        epoch = self.epochs.current_epoch
        if self.epochs.epoch_end():
            self.log.append((epoch, float(self.total.get_value())))
        return {"total": self.total.get_value()}


def test_a_trainer_resets_a_metric_once_an_epoch():
    log = []
    trainer = Trainer(log)
    controller = armillary.Controller(
        trainer=trainer, global_step=trainer.step, steps_per_loop=2
    )
    controller.train(steps=12)
    assert log == [(0, 6.0), (1, 22.0), (2, 6.0)]


@mistakes(
    {
        ValueError: {
            "`epoch_steps` is 0": lambda: armillary.EpochHelper(0, int),
            "`epoch_end` belongs to an epoch": armillary.EpochHelper(4, int).epoch_end,
            "`batch_index` belongs to an epoch": (
                lambda: armillary.EpochHelper(4, int).batch_index
            ),
        },
        TypeError: {
            "`global_step` is 3 of type int": lambda: armillary.EpochHelper(4, 3)
        },
    }
)
def test_wrong_use_is_an_error(call, error, message):
    with pytest.raises(error, match=message):
        call()
