"""Tests of the choice between a loop on the device and one in Python."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import armillary
from tests.problems import make_strategy


class Trainer(armillary.StandardTrainer):
    def __init__(self, strategy):
        options = armillary.StandardTrainerOptions(steps_per_chunk=3)
        super().__init__([np.ones((4, 2), np.float32)] * 20, options)
        self.strategy, self.count = strategy, jnp.zeros(())
        self.dropout = nnx.Dropout(0.5, rngs=nnx.Rngs(0))

    def train_step(self, iterator):
        def step_fn(batch):
            self.dropout(batch)
            self.count = self.count + 1

        self.strategy.run(step_fn, args=(next(iterator),))


@pytest.mark.slow
@pytest.mark.parametrize("num_replicas", [None, 2])
@pytest.mark.parametrize(
    "option", ["jax_disable_jit", "jax_check_tracer_leaks", "jax_debug_key_reuse"]
)
def test_a_step_runs_under_what_jax_has_for_debugging(option, num_replicas):
    strategy = (
        make_strategy(num_replicas) if num_replicas else armillary.DefaultStrategy()
    )
    jax.config.update(option, True)
    try:
        trainer = Trainer(strategy)
        trainer.train(2)
        trainer.train(1)
    finally:
        jax.config.update(option, False)
    assert int(trainer.count) == 3
