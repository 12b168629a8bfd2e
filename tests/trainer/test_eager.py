"""Tests of steps with `compile_step=False`, and of JAX's tools for debugging."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import armillary
from armillary.errors import CapturedStateError, RetraceError
from tests.problems import MLP, Classifier, make_batches, make_strategy, read_state

EAGER = armillary.StandardTrainerOptions(compile_step=False)


class Trainer(armillary.StandardTrainer):
    def __init__(self, options=EAGER, num_batches=4):
        super().__init__(make_batches(num_batches, start=0), options)
        self.total = jnp.zeros(())
        self.seen = []

    def train_step(self, iterator):
        value = next(iterator)["x"].sum()
        if not isinstance(value, jax.core.Tracer):
            self.seen.append(float(value))
        self.total = self.total + value


def test_steps_see_values():
    trainer = Trainer()

    trainer.train(2)
    trainer.train(9)

    assert trainer.seen == [0, 2, 4, 6]
    assert float(trainer.total) == 12
    assert trainer.data_exhausted


@pytest.mark.slow
def test_eager_steps_equal_compiled_ones():
    # A default strategy: on replicas JAX compiles each operation on its own.
    strategy = armillary.OneDeviceStrategy("cpu:0")
    states = []
    for compile_step in (True, False):
        trainer = Classifier(
            strategy, MLP(nnx.Rngs(0)), optax.sgd(0.1), compile_step=compile_step
        )
        trainer.train(3)
        states.append((read_state(trainer), trainer.train_dataset.get_state()))

    (compiled, position), (eager, eager_position) = states
    assert eager_position == position
    assert eager.keys() == compiled.keys()
    for path, value in compiled.items():
        np.testing.assert_allclose(eager[path], value, rtol=1e-4, atol=1e-5)


def test_an_exception_leaves_the_steps_before_it():
    class Breaks(Trainer):
        fails_at = 3

        def train_step(self, iterator):
            super().train_step(iterator)
            if len(self.seen) == self.fails_at:
                raise KeyError("a bad batch")

    trainer = Breaks()

    with pytest.raises(KeyError, match="a bad batch"):
        trainer.train(4)
    assert trainer.seen == [0, 2, 4]

    # The batch of the failed step is not lost, also if it is the last one.
    trainer.train(1)
    assert trainer.seen == [0, 2, 4, 4]
    trainer.fails_at = 5
    with pytest.raises(KeyError, match="a bad batch"):
        trainer.train(1)
    trainer.train(9)
    assert trainer.seen == [0, 2, 4, 4, 6, 6]
    assert trainer.data_exhausted


@pytest.mark.parametrize("compile_step", [True, False])
def test_a_step_that_takes_no_batch_is_an_error(compile_step):
    class Evaluator(armillary.StandardEvaluator):
        def eval_step(self, iterator):
            return jnp.zeros(())

    options = armillary.StandardEvaluatorOptions(compile_step=compile_step)
    evaluator = Evaluator(make_batches(2), options)

    with pytest.raises(
        RetraceError,
        match=r"`eval_step` took no batch from dataset 0 of 1, so its data would never "
        r"end. Call `next\(iterator\)` on each iterator, or leave the dataset out",
    ):
        evaluator.evaluate(-1)


@pytest.mark.parametrize("compile_step", [True, False])
def test_writing_to_state_out_of_reach_is_an_error(compile_step):
    counter = nnx.Variable(jnp.zeros(()))

    class Writes(Trainer):
        def train_step(self, iterator):
            strategy = armillary.get_strategy()
            strategy.run(jax.jit(lambda x: write(x)), args=(next(iterator)["x"][0],))

    def write(value):
        counter[...] += value

    trainer = Writes(armillary.StandardTrainerOptions(compile_step=compile_step))

    with pytest.raises(CapturedStateError, match="the trainer does not reach"):
        trainer.train(1)


class Dropping(armillary.StandardTrainer):
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
        make_strategy(num_replicas)
        if num_replicas
        else armillary.distribute.DefaultStrategy()
    )
    jax.config.update(option, True)
    try:
        trainer = Dropping(strategy)
        trainer.train(2)
        trainer.train(1)
    finally:
        jax.config.update(option, False)
    assert int(trainer.count) == 3
