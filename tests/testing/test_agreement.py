"""Tests of `assert_strategies_agree`: it passes, and finds each difference."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import armillary
from armillary.testing import assert_strategies_agree

NUM_EXAMPLES = 70
FEATURES = 32


class Regression(armillary.StandardTrainer, armillary.StandardEvaluator):
    """Fits a linear model, with a last batch of 6 of 16 examples."""

    def __init__(self, strategy, batch_size=16):
        rng = np.random.default_rng(0)
        inputs = rng.normal(size=(NUM_EXAMPLES, FEATURES)).astype(np.float32)
        weights = rng.normal(size=(FEATURES, FEATURES)).astype(np.float32)
        arrays = {"x": inputs, "y": inputs @ weights}
        source = armillary.data.from_arrays(arrays, batch_size=batch_size)
        exact = armillary.data.InputOptions(remainder="exact")
        armillary.StandardTrainer.__init__(
            self, strategy.distribute_dataset(source, exact)
        )
        armillary.StandardEvaluator.__init__(self, strategy.distribute_dataset(source))
        self.strategy = strategy
        self.model = nnx.Linear(FEATURES, FEATURES, rngs=nnx.Rngs(0))
        self.optimizer = nnx.Optimizer(self.model, optax.adam(0.01), wrt=nnx.Param)
        self.error = nnx.metrics.Average("error")

    def average(self, losses):
        return armillary.compute_average_loss(losses)

    def train_step(self, iterator):
        self.strategy.run(self.improve, args=(next(iterator),))

    def improve(self, batch):
        def loss_fn(model):
            losses = ((model(batch["x"]) - batch["y"]) ** 2).mean(axis=1)
            return self.average(losses)

        self.optimizer.update(
            self.model, armillary.all_reduce("sum", nnx.grad(loss_fn)(self.model))
        )

    def train_loop_end(self):
        return {"bias": jnp.abs(self.model.bias[...]).mean()}

    def eval_begin(self):
        self.error.reset()

    def eval_step(self, iterator):
        self.strategy.run(self.measure, args=(next(iterator),))

    def measure(self, batch):
        error = jnp.abs(self.model(batch["x"]) - batch["y"]).mean(axis=1)
        self.error.update(error=error)

    def eval_end(self, *_):
        return {"error": self.error.compute()}


def mirrored(count, **options):
    return armillary.MirroredStrategy(jax.devices()[:count], **options)


ONE = armillary.OneDeviceStrategy("cpu:0")


@pytest.mark.slow
def test_a_trainer_may_agree_under_all_with_short_batches_and_the_end_of_data():
    others = [
        mirrored(4),
        armillary.ShardedStrategy({"data": 2, "fsdp": 2, "tensor": 2}),
        armillary.distribute.CentralStorageStrategy(jax.devices()[1:3]),
    ]
    made = []

    def make_trainer(strategy):
        made.append(Regression(strategy))
        return made[-1]

    assert_strategies_agree(make_trainer, [ONE, *others])
    assert len(made) == 4
    assert all(trainer.data_exhausted for trainer in made)
    assert {int(trainer.optimizer.step[...]) for trainer in made} == {5}


def differ(make_trainer, other, **options):
    with pytest.raises(AssertionError) as error:
        assert_strategies_agree(make_trainer, [ONE, other], **options)
    return str(error.value)


class AveragesItsShare(Regression):
    def average(self, losses):
        return jnp.mean(losses)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # The library warns of this mistake too.
def test_a_reduction_that_does_not_fit_the_loss_differs_after_one_step():
    message = differ(AveragesItsShare, mirrored(2))
    assert "After one step, MirroredStrategy(2 x cpu) has other values than" in message
    assert "OneDeviceStrategy" in message
    assert "/mu/kernel: " in message
    assert "; all differ by 1\n" in message  # Twice as much: by all of it.
    assert "Look for a reduction that does not fit the loss" in message
    assert_strategies_agree(AveragesItsShare, [ONE, mirrored(2)], ignore=["/(mu|nu)/"])


@pytest.mark.slow
def test_data_that_depend_on_the_number_of_replicas_differ():
    def make_trainer(strategy):
        return Regression(strategy, batch_size=35 * strategy.num_replicas_in_sync)

    message = differ(make_trainer, mirrored(2), tolerance=100.0, steps=2)
    assert "After 2 steps" in message
    assert "data_exhausted: True instead of False" in message
    assert "Regression/optimizer/step: 1 instead of 2" in message
    assert "output['bias']: only under the first" in message


@pytest.mark.slow
def test_state_that_depends_on_the_strategy_differs():
    def make_trainer(strategy):
        trainer = Regression(strategy)
        count = strategy.num_replicas_in_sync
        trainer.scales = nnx.Variable(jnp.ones(count))
        if count > 1:
            trainer.more = nnx.Variable(jnp.zeros(()))
        return trainer

    message = differ(make_trainer, mirrored(2), steps=1)
    assert message.startswith("Before the first step, MirroredStrategy(2 x cpu) has")
    assert message.endswith("such as `nnx.Rngs(0)`.")
    assert "Regression/more: only under the second" in message
    assert "Regression/scales: float32 (2,) instead of float32 (1,)" in message


class GoesWrong(Regression):
    def train_loop_end(self):
        wrong = self.strategy.num_replicas_in_sync > 1
        return {"value": jnp.where(wrong, jnp.nan, jnp.inf) * jnp.ones(2)}

    def eval_end(self, *_):
        return {"count": self.strategy.num_replicas_in_sync}


@pytest.mark.slow
def test_outputs_of_loops_and_evaluations_are_compared():
    message = differ(GoesWrong, mirrored(2), steps=1)
    assert "in 1 of " in message
    assert "output['value']: nan instead of inf at [0]" in message
    assert_strategies_agree(GoesWrong, [mirrored(2), mirrored(2)], steps=1)
    message = differ(GoesWrong, mirrored(2), steps=1, ignore=["value"])
    assert "After an evaluation" in message
    assert "output['count']: 2 instead of 1" in message


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        (
            (Regression, [ONE]),
            ValueError,
            "`strategies` has 1, but it must have",
        ),
        (
            (Regression, [ONE, armillary.MirroredStrategy]),
            TypeError,
            r"`strategies\[1\]` is <class .* it must be a `Strategy`",
        ),
        (
            (lambda strategy: None, [ONE, ONE]),
            TypeError,
            "is None of type NoneType, but it must be a `AbstractTrainer`. Return a",
        ),
    ],
)
def test_arguments_that_are_no_strategy_or_trainer_are_errors(arguments, kind, message):
    with pytest.raises(kind, match=message):
        assert_strategies_agree(*arguments)
