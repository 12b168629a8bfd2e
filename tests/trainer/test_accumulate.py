"""One update of several micro-batches: the numbers of the whole batch."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import armillary
from armillary.errors import BatchSizeError
from armillary.trainer._program import Program
from tests.mistakes import mistakes
from tests.problems import MLP, make_digits

EXAMPLES = make_digits(96)


class Net(nnx.Module):
    def __init__(self, width=8):
        rngs = nnx.Rngs(0)
        self.first, self.last = nnx.Linear(64, width, rngs=rngs), nnx.Linear(
            width, 3, rngs=rngs
        )

    def __call__(self, x):
        return self.last(nnx.tanh(self.first(x.reshape(x.shape[0], -1))))


class Trainer(armillary.StandardTrainer):
    def __init__(self, strategy, model, batch_size=32, **options):
        dataset = strategy.distribute_dataset(
            armillary.data.from_arrays(EXAMPLES, batch_size=batch_size, repeat=True)
        )
        super().__init__(dataset, armillary.StandardTrainerOptions(**options))
        self.strategy, self.model = strategy, model
        self.optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
        self.accuracy = nnx.metrics.Accuracy()
        self.loss = jnp.zeros(())

    def losses(self, batch):
        logits = self.model(batch["image"])
        self.accuracy.update(logits=logits, labels=batch["label"])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])

    def train_step(self, iterator):
        def step_fn(batch):
            def loss_fn(batch):
                penalty = sum(jnp.sum(p**2) for p in jax.tree.leaves(self.params()))
                loss = armillary.compute_average_loss(self.losses(batch))
                return loss + armillary.scale_regularization_loss(1e-3 * penalty)

            loss, gradients = armillary.value_and_grad(loss_fn, self.model, batch=batch)
            self.optimizer.update(self.model, gradients)
            return loss

        losses = self.strategy.run(step_fn, args=(next(iterator),))
        self.loss = self.strategy.reduce("sum", losses)

    def params(self):
        return nnx.state(self.model, nnx.Param)


def make_strategy(num_replicas):
    if num_replicas == 0:
        return armillary.DefaultStrategy()
    return armillary.MirroredStrategy(jax.devices()[:num_replicas])


def train(trainer, num_steps=3):
    trainer.train(num_steps)
    return [*jax.tree.leaves(trainer.params()), trainer.loss, *trainer_counts(trainer)]


def trainer_counts(trainer):
    return [trainer.accuracy.total[...], trainer.accuracy.count[...]]


def compiled_text(trainer, monkeypatch):
    """Trains a step; returns the compiled program of it."""
    found = []
    call = Program.__call__

    def record(self, donated, others, chunk, start, num_steps, health=None, loops=None):
        if not found:
            jitted = self._compiled
            original = getattr(jitted, "__wrapped__", None)
            assert original is not None or hasattr(jitted, "lower")
            from armillary.trainer._program import _Inputs

            inputs = _Inputs(
                others,
                list(chunk),
                np.int32(start),
                np.int32(num_steps),
                health,
                loops,
            )
            found.append(jitted.lower(donated, inputs).compile())
        return call(self, donated, others, chunk, start, num_steps, health, loops)

    with monkeypatch.context() as patch:
        patch.setattr(Program, "__call__", record)
        trainer.train(1)
    return found[0]


@pytest.mark.parametrize("num_replicas", [0, 1, 4])
@pytest.mark.parametrize("options", [{}, {"compile_step": False}])
def test_the_update_is_that_of_the_whole_batch(num_replicas, options):
    strategy = make_strategy(num_replicas)
    expected = train(Trainer(make_strategy(0), Net()))
    found = train(Trainer(strategy, Net(), accumulate_steps=4, **options))
    for a, b in zip(expected, found, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
