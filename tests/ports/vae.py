"""A variational autoencoder of Flax Linen, whose Python loop splits the random keys."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax.training.train_state import TrainState

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

PIXELS, LATENTS = 36, 3
RNG = np.random.default_rng(0)
DATA = {
    "image": (RNG.uniform(size=(NUM_STEPS * BATCH_SIZE, PIXELS)) < 0.3).astype(
        "float32"
    )
}
TEST = {"image": (RNG.uniform(size=(19, PIXELS)) < 0.3).astype("float32")}


class VAE(nn.Module):
    """Encodes an image as a normal distribution, and decodes a draw from it."""

    @nn.compact
    def __call__(self, x: jax.Array, key: jax.Array | None) -> tuple[jax.Array, ...]:
        hidden = nn.relu(nn.Dense(16, name="encoder")(x))
        mean = nn.Dense(LATENTS, name="mean")(hidden)
        log_variance = nn.Dense(LATENTS, name="log_variance")(hidden)
        z = mean
        if key is not None:
            noise = jax.random.normal(key, mean.shape)
            z = z + jnp.exp(0.5 * log_variance) * noise
        logits = nn.Dense(PIXELS, name="out")(nn.relu(nn.Dense(16, name="decoder")(z)))
        return logits, mean, log_variance


def losses_of(params: Any, images: Any, key: jax.Array | None) -> jax.Array:
    outputs: Any = VAE().apply({"params": params}, images, key)
    logits, mean, log_variance = outputs
    errors = optax.sigmoid_binary_cross_entropy(logits, images).sum(axis=-1)
    spread = 1 + log_variance - mean**2 - jnp.exp(log_variance)
    return errors - 0.5 * spread.sum(axis=-1)


def make_state() -> TrainState:
    key = jax.random.key(0)
    params = jax.jit(VAE().init)(key, DATA["image"][:1], key)["params"]
    return TrainState.create(apply_fn=VAE().apply, params=params, tx=optax.adam(0.01))


def run_original(num_replicas: int) -> Result:
    def train_step(state: TrainState, images: jax.Array, keys: jax.Array) -> Any:
        def loss_fn(params: Any) -> jax.Array:
            return losses_of(params, images, keys[0]).mean()

        loss, grads = jax.value_and_grad(loss_fn)(state.params)
        loss, grads = jax.lax.pmean((loss, grads), "batch")
        return state.apply_gradients(grads=grads), loss

    compiled = on_replicas(train_step, num_replicas)
    state, key, losses = make_state(), jax.random.key(1), []
    for batch in batches_of(DATA):
        # Each replica draws its own noise, and the first one as one device does.
        keys = keys_of_replicas(key, num_replicas)
        own = jnp.stack([jax.random.split(each)[1] for each in keys])
        state, loss = compiled(state, batch["image"], own)
        key = jax.random.split(key)[0]
        losses.append(float(loss))

    # Without noise, so that the result does not depend on how the images are divided.
    values = jax.jit(losses_of)(state.params, TEST["image"], None)
    return Result(losses, {"loss": float(np.mean(values))})


def train_step(state: Any, batch: Any) -> Any:
    key, now = jax.random.split(state["key"])

    def loss_fn(params: Any) -> jax.Array:
        return losses_of(params, batch["image"], now).mean()

    loss, grads = jax.value_and_grad(loss_fn)(state["train"].params)
    grads = armillary.all_reduce("mean", grads)
    train = state["train"].apply_gradients(grads=grads)
    return {"train": train, "key": key}, {"loss": loss}


def make_trainer(strategy: armillary.distribute.Strategy) -> armillary.StepTrainer:
    state = {"train": make_state(), "key": jax.random.key(1)}
    return armillary.StepTrainer(train_step, state, source_of(DATA), strategy=strategy)


def make_evaluator(trainer: armillary.StepTrainer) -> armillary.StepEvaluator:
    def evaluate(state: Any, batch: Any) -> Any:
        return {"loss": losses_of(state["train"].params, batch["image"], None)}

    data = armillary.data.from_arrays(TEST, batch_size=8)
    return armillary.StepEvaluator(evaluate, trainer, data)


PORT = Port(run_original, make_trainer, make_evaluator)
