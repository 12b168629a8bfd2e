"""Tests of the ways users hold their state: rebound pytrees, several models, counts."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import armillary
from armillary.data import from_arrays
from tests.problems import make_strategy, read_state


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Line:
    """A model that is a value: a step makes a new one."""

    slope: jax.Array
    offset: jax.Array
    power: int = dataclasses.field(default=1, metadata={"static": True})

    def __call__(self, x):
        return self.slope * x**self.power + self.offset


class Regression(armillary.StandardTrainer):
    """Fits y = 3 x + 1 by assigning new values to `model` and `opt_state`."""

    def __init__(self, strategy, model, to_arrays=lambda model: model):
        x = np.linspace(-1, 1, 8, dtype=np.float32)
        arrays = {"x": x, "y": 3 * x + 1}
        super().__init__(from_arrays(arrays, batch_size=8, repeat=True))
        self.strategy, self.model = strategy, model
        self.transform = optax.adam(0.1)
        self.opt_state = self.transform.init(to_arrays(model))
        self.num_steps = armillary.create_global_step()

    def train_step(self, iterator):
        def step_fn(batch: Any) -> None:
            def loss_fn(model: Any) -> jax.Array:
                errors = (jax.vmap(model)(batch["x"]) - batch["y"]) ** 2
                return armillary.compute_average_loss(errors)

            grads = armillary.all_reduce("sum", self.gradient(loss_fn))
            updates, self.opt_state = self.transform.update(grads, self.opt_state)
            self.model = self.apply(updates)
            self.num_steps[...] += 1

        self.strategy.run(step_fn, args=(next(iterator),))

    def gradient(self, loss_fn):
        return jax.grad(loss_fn)(self.model)

    def apply(self, updates):
        return optax.apply_updates(self.model, updates)


@pytest.mark.slow
@pytest.mark.parametrize("num_replicas", [None, 1, 4])
def test_a_model_that_is_a_value_trains(num_replicas):
    strategy = (
        make_strategy(num_replicas) if num_replicas else armillary.DefaultStrategy()
    )
    trainer = Regression(strategy, Line(jnp.zeros(()), jnp.zeros(())))

    trainer.train(150)
    trainer.train(150)

    assert int(trainer.num_steps[...]) == 300
    assert isinstance(trainer.model, Line) and trainer.model.power == 1
    np.testing.assert_allclose(trainer.model.slope, 3, atol=1e-2)
    np.testing.assert_allclose(trainer.model.offset, 1, atol=1e-2)


class Gan(armillary.StandardTrainer):
    """Two models that share an embedding, two optimizers, two batches of one set."""

    def __init__(self, strategy):
        rng = np.random.default_rng(0)
        real = rng.normal(2, 1, (32, 2)).astype(np.float32)
        noise = rng.normal(0, 1, (48, 2)).astype(np.float32)
        super().__init__(
            {
                "real": from_arrays(real, batch_size=8, repeat=True),
                "noise": from_arrays(noise, batch_size=8, repeat=True),
            }
        )
        rngs = nnx.Rngs(0)
        self.strategy = strategy
        self.embedding = nnx.Linear(2, 2, rngs=rngs)
        self.generator = nnx.Sequential(self.embedding, nnx.Linear(2, 2, rngs=rngs))
        self.critic = nnx.Sequential(self.embedding, nnx.Linear(2, 1, rngs=rngs))
        self.frozen = nnx.Linear(2, 2, rngs=rngs)
        self.generator_optimizer = nnx.Optimizer(
            self.generator, optax.sgd(0.01), wrt=nnx.Param
        )
        self.critic_optimizer = nnx.Optimizer(
            self.critic, optax.sgd(0.02), wrt=nnx.Param
        )

    def train_step(self, iterator):
        def critic_fn(real, noise):
            def loss_fn(critic):
                fake = self.generator(self.frozen(noise))
                return armillary.compute_average_loss(
                    (critic(fake) - critic(real))[:, 0]
                )

            self.critic_optimizer.update(
                self.critic, armillary.all_reduce("sum", nnx.grad(loss_fn)(self.critic))
            )

        def generator_fn(noise):
            def loss_fn(generator):
                fake = generator(self.frozen(noise))
                return armillary.compute_average_loss(-self.critic(fake)[:, 0])

            grads = armillary.all_reduce("sum", nnx.grad(loss_fn)(self.generator))
            self.generator_optimizer.update(self.generator, grads)

        batches = next(iterator["real"]), next(iterator["noise"])
        self.strategy.run(critic_fn, args=batches)
        self.strategy.run(generator_fn, args=(next(iterator["noise"]),))


@pytest.mark.slow
def test_two_models_with_a_shared_part_train_alike_on_any_number_of_replicas():
    states = []
    for num_replicas in (1, 4):
        gan = Gan(make_strategy(num_replicas))
        frozen = np.array(gan.frozen.kernel[...])
        shared = np.array(gan.embedding.kernel[...])
        gan.train(6)
        gan.train(4)
        assert gan.generator.layers[0] is gan.critic.layers[0] is gan.embedding
        np.testing.assert_array_equal(gan.frozen.kernel[...], frozen)
        assert not np.array_equal(gan.embedding.kernel[...], shared)
        assert int(gan.critic_optimizer.step[...]) == 10
        states.append(read_state(gan))

    assert states[0].keys() == states[1].keys()
    # One slot for what two models share, under the name that is found first.
    assert sum(path.endswith("kernel") for path in states[0] if "opt" not in path) == 4
    for path, value in states[0].items():
        np.testing.assert_allclose(states[1][path], value, rtol=1e-4, atol=1e-6)
