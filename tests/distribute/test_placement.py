"""State is right whatever a user, or a program that failed, has left in the places."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import armillary
from armillary.data import from_arrays
from armillary.trainer._program import Program

STRATEGIES = {
    "default": armillary.DefaultStrategy,
    "mirrored": lambda: armillary.MirroredStrategy(jax.devices()[:2]),
}


class Trainer(armillary.StandardTrainer):
    """Adds what it reads to a total, in plain places and in NNX variables."""

    def __init__(self, strategy=None):
        strategy = strategy or armillary.DefaultStrategy()
        data = from_arrays({"x": np.ones(80, np.float32)}, batch_size=2)
        super().__init__(strategy.distribute_dataset(data))
        self.strategy = strategy
        self.plain, self.rate = jnp.zeros(2), nnx.Variable(jnp.ones(2))
        self.both = nnx.Variable({"total": jnp.zeros(2), "rate": jnp.ones(2)})

    def train_step(self, iterator):
        next(iterator)
        self.plain = self.plain + self.rate[...]
        self.both["total"] = self.both["total"] + self.both["rate"]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_what_comes_back_after_a_program_failed_is_used(strategy, monkeypatch):
    trainer = Trainer(STRATEGIES[strategy]())
    trainer.train(1)
    plain, rate = trainer.plain, trainer.rate.get_value()

    trainer.plain = jnp.full(2, 100.0)
    trainer.rate.set_value(jnp.full(2, 50.0))
    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="too full"):

        def fail(*_):
            raise RuntimeError("The device is too full.")

        patch.setattr(Program, "__call__", fail)
        trainer.train(1)
    trainer.plain = plain
    trainer.rate.set_value(rate)
    trainer.train(1)

    np.testing.assert_array_equal(trainer.plain, [2, 2])


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_change_inside_the_container_of_a_variable_is_used(strategy):
    trainer = Trainer(STRATEGIES[strategy]())
    trainer.train(1)

    trainer.both["total"] = mine = jnp.full(2, 10.0)
    trainer.train(1)
    np.testing.assert_array_equal(trainer.both["total"], [11, 11])
    trainer.both["rate"] = jnp.full(2, 5.0)
    trainer.train(1)

    np.testing.assert_array_equal(trainer.both["total"], [16, 16])
    np.testing.assert_array_equal(mine, [10, 10])


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_what_is_written_into_a_variable_with_a_numpy_array_is_used(strategy):
    trainer = Trainer(STRATEGIES[strategy]())
    trainer.train(1)
    mine = np.full(2, 10, np.float32)
    trainer.rate.set_value(mine)
    trainer.train(1)

    trainer.rate[0] = 20
    trainer.train(1)

    np.testing.assert_array_equal(trainer.plain, [31, 21])
