"""Tests that training under every strategy gives the numbers of one replica."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import armillary
from tests.distribute.contract import strategy as strategy
from tests.problems import Metrics, make_training_data, read_state

pytestmark = pytest.mark.slow

NUM_STEPS = 4


class Net(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.first = nnx.Linear(64, 8, rngs=rngs)
        self.last = nnx.Linear(8, 3, rngs=rngs)
        self.mean = nnx.BatchStat(jnp.zeros(()))
        self.rngs = nnx.Rngs(1)

    def __call__(self, x):
        x = x.reshape(x.shape[0], -1)
        self.mean[...] = 0.9 * self.mean[...] + 0.1 * jnp.mean(x)
        x = x + 0 * self.rngs.uniform(x.shape)  # moves the random state on
        return self.last(nnx.tanh(self.first(x)))


class Trainer(armillary.StandardTrainer):
    """A trainer with every kind of state that has a policy."""

    def __init__(self, strategy, **options):
        self.data = make_training_data(strategy)
        super().__init__(self.data, armillary.StandardTrainerOptions(**options))
        self.strategy, self.model = strategy, Net()
        self.optimizer = nnx.Optimizer(self.model, optax.adam(1e-2), wrt=nnx.Param)
        self.accuracy = nnx.metrics.Accuracy()
        self.global_step = armillary.create_global_step()
        self.seen = nnx.Variable(
            jnp.zeros(()), aggregation=armillary.distribute.VariableAggregation.SUM
        )
        self.loss = jnp.zeros(())

    def train_step(self, iterator):
        def step_fn(batch):
            def loss_fn(model):
                logits = model(batch["image"])
                losses = optax.softmax_cross_entropy_with_integer_labels(
                    logits, batch["label"]
                )
                return armillary.compute_average_loss(losses), logits

            compute = nnx.value_and_grad(loss_fn, has_aux=True)
            (loss, logits), gradients = compute(self.model)
            gradients = armillary.all_reduce("sum", gradients)
            self.accuracy.update(logits=logits, labels=batch["label"])
            self.optimizer.update(self.model, gradients)
            self.global_step[...] += 1
            self.seen[...] += batch["label"].shape[0]
            return loss

        losses = self.strategy.run(step_fn, args=(next(iterator),))
        self.loss = self.strategy.reduce("sum", losses)


def state_of(trainer):
    return {
        path: value
        for path, value in read_state(trainer).items()
        if value.dtype.kind in "fiu"
    }


def assert_same(trainer, other):
    found, expected = state_of(trainer), state_of(other)
    assert found.keys() == expected.keys()
    for path, value in expected.items():
        np.testing.assert_allclose(
            found[path], value, rtol=1e-4, atol=1e-5, err_msg=path
        )


@pytest.fixture(scope="module")
def expected():
    trainer = Trainer(armillary.distribute.DefaultStrategy())
    trainer.train(NUM_STEPS)
    return trainer


def test_training_gives_the_state_of_one_replica(strategy, expected):
    trainer = Trainer(strategy)
    trainer.train(NUM_STEPS)
    assert_same(trainer, expected)
    assert int(trainer.global_step[...]) == NUM_STEPS
    assert float(trainer.seen[...]) == 16 * NUM_STEPS


def make_manager(trainer, folder):
    parts = {
        "model": trainer.model,
        "optimizer": trainer.optimizer,
        "accuracy": trainer.accuracy,
        "step": trainer.global_step,
        "seen": trainer.seen,
        "data": trainer.data,
    }
    return armillary.CheckpointManager(
        armillary.Checkpoint(**parts), folder, step_counter=trainer.global_step
    )


def test_a_checkpoint_goes_from_one_replica_to_any_strategy_and_back(
    strategy, expected, tmp_path
):
    half = Trainer(armillary.distribute.DefaultStrategy())
    half.train(NUM_STEPS // 2 - 1)
    make_manager(half, tmp_path / "one").save()

    there = Trainer(strategy)
    there.train(1)  # what is restored must go where the strategy has had it
    make_manager(there, tmp_path / "one").restore_or_initialize()
    there.train(1)
    manager = make_manager(there, tmp_path / "other")
    manager.save()
    manager.sync()

    back = Trainer(armillary.distribute.DefaultStrategy())
    make_manager(back, tmp_path / "other").restore_or_initialize()
    back.train(NUM_STEPS // 2)
    assert_same(back, expected)


def test_an_evaluation_counts_every_example_once(strategy):
    rng = np.random.default_rng(0)
    arrays = {
        "value": rng.normal(size=21).astype(np.float32),
        "logits": rng.normal(size=(21, 3)).astype(np.float32),
        "label": rng.integers(0, 3, 21),
    }
    dataset = strategy.distribute_dataset(
        armillary.data.from_arrays(arrays, batch_size=8)
    )
    metrics = Metrics(strategy, dataset)
    output = metrics.evaluate(-1)
    assert metrics.counts == (21, 21)
    np.testing.assert_allclose(output["average"], arrays["value"].mean(), rtol=1e-5)
