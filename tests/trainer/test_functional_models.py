"""Tests that a model which is a new value in each step trains as in plain JAX."""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

import armillary
from armillary.data import from_arrays
from tests.problems import make_strategy
from tests.tiers import slow_after_first


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Line:
    """A model that is a value: a step makes a new one."""

    slope: jax.Array
    offset: jax.Array
    power: int = dataclasses.field(default=1, metadata={"static": True})

    def __call__(self, x):
        return self.slope * x**self.power + self.offset


class Module(eqx.Module):
    """The same in Equinox."""

    slope: jax.Array
    offset: jax.Array
    power: int = eqx.field(static=True, default=1)
    __call__ = Line.__call__


X = np.linspace(-1, 1, 8, dtype=np.float32)
DATA = {"x": X, "y": 3 * X + 1}
TRANSFORM = optax.adam(0.1)


def compute_losses(model, batch):
    return (jax.vmap(model)(batch["x"]) - batch["y"]) ** 2


class Regression(armillary.StandardTrainer):
    """Fits y = 3 x + 1 by assigning new values to `model` and `opt_state`."""

    def __init__(self, strategy, model):
        super().__init__(from_arrays(DATA, batch_size=8, repeat=True))
        self.strategy, self.model = strategy, model
        self.opt_state = TRANSFORM.init(model)

    def train_step(self, iterator):
        def step_fn(batch):
            def loss_fn(model):
                return armillary.compute_average_loss(compute_losses(model, batch))

            grads = armillary.all_reduce("sum", jax.grad(loss_fn)(self.model))
            updates, self.opt_state = TRANSFORM.update(grads, self.opt_state)
            self.model = optax.apply_updates(self.model, updates)

        self.strategy.run(step_fn, args=(next(iterator),))


@slow_after_first("kind", [Line, Module])
@slow_after_first("num_replicas", [None, 4])
def test_a_model_that_is_a_value_trains_as_in_plain_jax(kind, num_replicas):
    model = kind(jnp.zeros(()), jnp.zeros(()))
    strategy = (
        make_strategy(num_replicas)
        if num_replicas
        else armillary.distribute.DefaultStrategy()
    )
    trainer = Regression(strategy, model)
    trainer.train(20)
    trainer.train(10)

    @jax.jit
    def step(model, state):
        grads = jax.grad(lambda model: compute_losses(model, DATA).mean())(model)
        updates, state = TRANSFORM.update(grads, state)
        return optax.apply_updates(model, updates), state

    state = TRANSFORM.init(model)
    for _ in range(30):
        model, state = step(model, state)
    assert type(trainer.model) is kind and trainer.model.power == 1
    np.testing.assert_allclose(trainer.model.slope, model.slope, rtol=1e-5)
    np.testing.assert_allclose(trainer.model.offset, model.offset, rtol=1e-5)
