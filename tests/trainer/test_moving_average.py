"""A moving average of parameters: Optax's figures, on any number of replicas."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import armillary
from armillary import ExponentialMovingAverage
from tests.mistakes import mistakes

RNG = np.random.default_rng(0)
DATA = {
    "x": RNG.normal(size=(32, 3)).astype("float32"),
    "y": RNG.normal(size=(32, 1)).astype("float32"),
}


class Model(nnx.Module):
    def __init__(self, rngs):
        self.dense = nnx.Linear(3, 4, rngs=rngs)
        self.norm = nnx.BatchNorm(4, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)
        self.last = nnx.Linear(4, 1, rngs=rngs)

    def __call__(self, x):
        return self.last(self.dropout(self.norm(self.dense(x))))


class Trainer(armillary.StandardTrainer):
    """Averages in the step; keeps the parameters of all steps for the test."""

    def __init__(self, strategy, model, averages):
        source = armillary.data.from_arrays(DATA, batch_size=8, repeat=True)
        super().__init__(strategy.distribute_dataset(source))
        self.strategy, self.model, self.averages = strategy, model, averages
        self.optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)

    def train_step(self, iterator):
        def step_fn(batch):
            def loss_fn(model):
                losses = jnp.square(model(batch["x"]) - batch["y"]).mean(-1)
                return armillary.compute_average_loss(losses)

            self.optimizer.update(
                self.model, armillary.all_reduce("sum", nnx.grad(loss_fn)(self.model))
            )
            self.averages.update(self.model)

        self.strategy.run(step_fn, args=(next(iterator),))


class Evaluator(armillary.StandardEvaluator):
    def __init__(self, strategy, model):
        source = armillary.data.from_arrays(DATA, batch_size=8)
        super().__init__(strategy.distribute_dataset(source))
        self.strategy, self.model = strategy, model
        self.loss = nnx.metrics.Average("loss")

    def eval_begin(self):
        self.loss.reset()

    def eval_step(self, iterator):
        def step_fn(batch):
            losses = jnp.square(self.model(batch["x"]) - batch["y"]).mean(-1)
            self.loss.update(loss=losses)

        self.strategy.run(step_fn, args=(next(iterator),))

    def eval_end(self, *state):
        return {"loss": self.loss.compute()}


def make(make_model, strategy=None, decay=0.8, **options):
    strategy = strategy or armillary.OneDeviceStrategy(jax.devices()[0])
    with strategy.scope():
        model = make_model(nnx.Rngs(0))
        averages = ExponentialMovingAverage(model, decay, **options)
        return Trainer(strategy, model, averages)


def make_linear(rngs):
    return nnx.Linear(3, 1, rngs=rngs)


def read(model, *filters):
    return jax.tree.map(np.asarray, nnx.to_pure_dict(nnx.state(model, *filters)))


def assert_close(left, right):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 1e-5, 1e-6), left, right)


def follow(trainer, num_steps):
    """Returns the parameters before each step, and after the last one."""
    seen = [read(trainer.model, nnx.Param)]
    for _ in range(num_steps):
        trainer.train(1)
        seen.append(read(trainer.model, nnx.Param))
    return seen


def test_the_averages_are_those_of_optax():
    trainer = make(make_linear)
    first, *rest = follow(trainer, 6)
    expected = first
    for params in rest:
        expected = optax.incremental_update(params, expected, 0.2)
    assert_close(read(trainer.averages.model, nnx.Param), expected)
    assert int(trainer.averages.num_updates[...]) == 6

    trainer = make(make_linear, decay=lambda n: 1 - 0.2 / (1 - 0.8 ** (n + 1)))
    first, *rest = follow(trainer, 6)
    transform = optax.ema(0.8, debias=True)
    state = transform.init(first)
    for params in rest:
        expected, state = transform.update(params, state)
    assert_close(read(trainer.averages.model, nnx.Param), expected)


@pytest.mark.each_case
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["mirrored", "sharded"])
def test_replicas_equal_one(kind):
    devices = jax.devices()[:4]
    strategies = {
        "mirrored": lambda: armillary.MirroredStrategy(devices),
        "sharded": lambda: armillary.ShardedStrategy(devices=devices),
    }
    one, several = make(make_linear), make(make_linear, strategies[kind]())
    one.train(7)
    several.train(7)
    assert_close(read(several.averages.model), read(one.averages.model))


@pytest.mark.slow
def test_it_is_saved_restored_and_evaluated(tmp_path):
    def run(steps):
        strategy = armillary.MirroredStrategy(jax.devices()[:2])
        trainer = make(make_linear, strategy)
        checkpoint = armillary.Checkpoint(
            model=trainer.model,
            optimizer=trainer.optimizer,
            averages=trainer.averages,
            data=trainer.train_dataset,
        )
        controller = armillary.Controller(
            trainer=trainer,
            evaluator=Evaluator(strategy, trainer.averages.model),
            global_step=trainer.optimizer.step,
            strategy=strategy,
            steps_per_loop=4,
            checkpoint_manager=armillary.CheckpointManager(checkpoint, tmp_path),
        )
        return trainer, controller.train_and_evaluate(steps)

    run(4)
    trainer, output = run(8)

    whole = make(make_linear)
    whole.train(8)
    assert int(trainer.averages.num_updates[...]) == 8
    assert_close(read(trainer.averages.model), read(whole.averages.model))
    predicted = whole.averages.model(jnp.asarray(DATA["x"]))
    np.testing.assert_allclose(output["loss"], np.mean((predicted - DATA["y"]) ** 2))


@pytest.mark.slow
def test_averages_of_short_floats_are_long():
    model = nnx.Linear(2, 1, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    averages = ExponentialMovingAverage(model, 0.999)
    model.kernel[...] = model.kernel[...] + 1
    before = averages.model.kernel[...]
    averages.update(model)
    assert before.dtype == averages.model.kernel[...].dtype == jnp.float32
    moved = averages.model.kernel[...] - before
    np.testing.assert_allclose(moved, np.full((2, 1), 1e-3), rtol=1e-2)


def update_from_itself():
    averages = ExponentialMovingAverage(make_linear(nnx.Rngs(0)), 0.9)
    averages.update(averages.model)


@mistakes(
    {
        TypeError: {
            "`model` is 3 of type int.*`use_ema=True`": (
                lambda: ExponentialMovingAverage(3, 0.9)
            ),
        },
        ValueError: {
            "`decay` is 1, but it must be above 0": lambda: make(make_linear, decay=1),
            "`model` is the model of the average itself": update_from_itself,
        },
    }
)
def test_what_cannot_be_averaged_is_an_error(call, error, message):
    with pytest.raises(error, match=message):
        call()


@pytest.mark.slow
def test_other_state_is_that_of_the_model():
    trainer = make(Model, armillary.MirroredStrategy(jax.devices()[:2]))
    before = read(trainer.averages.model, nnx.RngCount)
    trainer.train(3)
    statistics = read(trainer.model, nnx.BatchStat)
    assert_close(read(trainer.averages.model, nnx.BatchStat), statistics)
    assert np.abs(statistics["norm"]["mean"]).max() > 0
    jax.tree.map(
        np.testing.assert_array_equal,
        read(trainer.averages.model, nnx.RngCount),
        before,
    )
