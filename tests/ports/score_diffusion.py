"""Score-based diffusion with Equinox: a module as state, and keys split in the loop."""

import functools
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

import armillary
from tests.ports.port import (
    BATCH_SIZE,
    NUM_STEPS,
    Port,
    Result,
    batches_of,
    keys_of_replicas,
    on_replicas,
    source_of,
)

SIZE, LAST_TIME = 6, 10.0
RNG = np.random.default_rng(0)
DATA = {"x": RNG.normal(size=(NUM_STEPS * BATCH_SIZE, SIZE)).astype("float32")}
OPTIMIZER = optax.adabelief(3e-3)


class Score(eqx.Module):
    """The score of noisy data at a time: a network with a function and a float."""

    layers: list[eqx.nn.Linear]
    activation: Any
    last_time: float

    def __init__(self, key: jax.Array) -> None:
        first, last = jax.random.split(key)
        self.layers = [
            eqx.nn.Linear(SIZE + 1, 16, key=first),
            eqx.nn.Linear(16, SIZE, key=last),
        ]
        self.activation = jax.nn.gelu
        self.last_time = LAST_TIME

    def __call__(self, time: jax.Array, x: jax.Array) -> jax.Array:
        time = jnp.reshape(time / self.last_time, 1)
        hidden = self.activation(self.layers[0](jnp.concatenate([x, time])))
        return self.layers[1](hidden)


def loss_of_one(
    model: Score, x: jax.Array, time: jax.Array, key: jax.Array
) -> jax.Array:
    # The noise grows linearly in time, as in the original.
    mean = x * jnp.exp(-0.5 * time)
    spread = jnp.sqrt(jnp.maximum(1 - jnp.exp(-time), 1e-5))
    noise = jax.random.normal(key, x.shape)
    errors = model(time, mean + spread * noise) + noise / spread
    return (1 - jnp.exp(-time)) * jnp.mean(errors**2)


def loss_of_batch(model: Score, x: jax.Array, key: jax.Array) -> jax.Array:
    """Returns the mean loss, at times that are spread evenly over the batch."""
    time_key, key = jax.random.split(key)
    width = LAST_TIME / x.shape[0]
    times = jax.random.uniform(time_key, (x.shape[0],), maxval=width)
    times = times + width * jnp.arange(x.shape[0])
    keys = jax.random.split(key, x.shape[0])
    return jnp.mean(jax.vmap(functools.partial(loss_of_one, model))(x, times, keys))


def make_state() -> tuple[Score, Any]:
    model = Score(jax.random.key(0))
    return model, OPTIMIZER.init(eqx.filter(model, eqx.is_inexact_array))


def run_original(num_replicas: int) -> Result:
    if num_replicas == 1:
        return _run_on_one_device()

    # Each replica has its own noise and times. The arrays alone go through `shard_map`.
    _, static = eqx.partition(make_state(), eqx.is_array)

    def step(arrays: Any, x: jax.Array, keys: jax.Array) -> Any:
        model, opt_state = eqx.combine(arrays, static)
        loss, grads = eqx.filter_value_and_grad(loss_of_batch)(model, x, keys[0])
        loss, grads = jax.lax.pmean((loss, grads), "batch")
        updates, opt_state = OPTIMIZER.update(grads, opt_state)
        state = eqx.apply_updates(model, updates), opt_state
        return eqx.filter(state, eqx.is_array), loss

    compiled = on_replicas(step, num_replicas)
    arrays = eqx.filter(make_state(), eqx.is_array)
    key, losses = jax.random.key(1), []
    for batch in batches_of(DATA):
        keys = keys_of_replicas(key, num_replicas)
        arrays, loss = compiled(arrays, batch["x"], keys)
        key = jax.random.split(key, 1)[0]
        losses.append(float(loss))
    return Result(losses, {})


def _run_on_one_device() -> Result:
    @eqx.filter_jit
    def make_step(model: Score, x: jax.Array, key: jax.Array, opt_state: Any) -> Any:
        loss, grads = eqx.filter_value_and_grad(loss_of_batch)(model, x, key)
        updates, opt_state = OPTIMIZER.update(grads, opt_state)
        model = eqx.apply_updates(model, updates)
        return loss, model, jax.random.split(key, 1)[0], opt_state

    model, opt_state = make_state()
    key, losses = jax.random.key(1), []
    for batch in batches_of(DATA):
        loss, model, key, opt_state = make_step(model, batch["x"], key, opt_state)
        losses.append(float(loss))
    return Result(losses, {})


def train_step(state: Any, batch: Any) -> Any:
    model, opt_state, key = state
    loss, grads = eqx.filter_value_and_grad(loss_of_batch)(model, batch["x"], key)
    grads = armillary.all_reduce("mean", grads)
    updates, opt_state = OPTIMIZER.update(grads, opt_state)
    key = jax.random.split(key, 1)[0]
    return (eqx.apply_updates(model, updates), opt_state, key), {"loss": loss}


def make_trainer(
    strategy: armillary.distribute.Strategy, make_key: Any = jax.random.key
) -> armillary.StepTrainer:
    state = (*make_state(), make_key(1))
    return armillary.StepTrainer(train_step, state, source_of(DATA), strategy=strategy)


PORT = Port(run_original, make_trainer)
