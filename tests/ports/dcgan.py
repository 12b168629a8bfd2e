"""Two networks of Equinox against each other, with batch norm in an `eqx.nn.State`."""

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
    source_of,
)

NUM_PIXELS, NUM_LATENTS = 16, 4
RNG = np.random.default_rng(0)
IMAGES = RNG.uniform(-1, 1, (NUM_STEPS * BATCH_SIZE, NUM_PIXELS)).astype("float32")
DATA = {"image": IMAGES}
OPTIMIZER = optax.adam(0.01, b1=0.5)


class Network(eqx.Module):
    """Two layers with batch norm between them."""

    first: eqx.nn.Linear
    norm: eqx.nn.BatchNorm
    last: eqx.nn.Linear

    def __init__(self, num_inputs: int, num_outputs: int, key: jax.Array) -> None:
        first, last = jax.random.split(key)
        # A bias before batch norm would have a gradient of rounding errors alone, which
        # Adam makes steps of the usual size of.
        self.first = eqx.nn.Linear(num_inputs, 8, use_bias=False, key=first)
        self.norm = eqx.nn.BatchNorm(8, axis_name="batch", momentum=0.9, mode="ema")
        self.last = eqx.nn.Linear(8, num_outputs, key=last)

    def __call__(self, x: jax.Array, state: eqx.nn.State) -> Any:
        hidden, state = self.norm(self.first(x), state)
        return self.last(jax.nn.leaky_relu(hidden)), state


def make_state() -> dict[str, Any]:
    first, last = jax.random.split(jax.random.key(0))
    make = eqx.nn.make_with_state(Network)
    parts = {
        "generator": make(NUM_LATENTS, NUM_PIXELS, first),
        "discriminator": make(NUM_PIXELS, 1, last),
    }
    models = {name: model for name, (model, _) in parts.items()}
    return {
        "models": models,
        "statistics": {name: statistics for name, (_, statistics) in parts.items()},
        "optimizers": {
            name: OPTIMIZER.init(eqx.filter(model, eqx.is_inexact_array))
            for name, model in models.items()
        },
        "key": jax.random.key(1),
    }


def apply(model: Network, x: jax.Array, statistics: eqx.nn.State) -> Any:
    mapped = jax.vmap(model, axis_name="batch", in_axes=(0, None), out_axes=(0, None))
    return mapped(x, statistics)


def train_step(state: dict[str, Any], images: Any, reduce: Any) -> Any:
    """Trains the discriminator, and then the generator against the new one."""
    key, first, last = jax.random.split(state["key"], 3)
    models, statistics = dict(state["models"]), dict(state["statistics"])
    optimizers = dict(state["optimizers"])
    shape = images.shape[0], NUM_LATENTS

    def judge_both(discriminator: Network) -> Any:
        noise = jax.random.normal(first, shape)
        fakes, _ = apply(models["generator"], noise, statistics["generator"])
        real, new = apply(discriminator, images, statistics["discriminator"])
        fake, new = apply(discriminator, fakes, new)
        losses = jax.nn.softplus(-real) + jax.nn.softplus(fake)
        return jnp.mean(losses) / 2, new

    def deceive(generator: Network) -> Any:
        noise = jax.random.normal(last, shape)
        fakes, new = apply(generator, noise, statistics["generator"])
        fake, _ = apply(models["discriminator"], fakes, statistics["discriminator"])
        return jnp.mean(jax.nn.softplus(-fake)), new

    losses = {}
    for name, loss_fn in (("discriminator", judge_both), ("generator", deceive)):
        grad_fn = eqx.filter_value_and_grad(loss_fn, has_aux=True)
        (losses[name], statistics[name]), grads = grad_fn(models[name])
        updates, optimizers[name] = OPTIMIZER.update(reduce(grads), optimizers[name])
        models[name] = eqx.apply_updates(models[name], updates)

    after = {
        "models": models,
        "statistics": statistics,
        "optimizers": optimizers,
        "key": key,
    }
    loss = losses["discriminator"] + losses["generator"]
    return after, {"loss": loss, **losses}


def run_original(num_replicas: int) -> Result:
    if num_replicas == 1:
        make_step = eqx.filter_jit(
            lambda state, images: train_step(state, images, lambda grads: grads)
        )
    else:
        make_step = eqx.filter_jit(
            lambda state, images: _step_of_replicas(state, images, num_replicas)
        )
    state, losses = make_state(), []
    for batch in batches_of(DATA):
        state, metrics = make_step(state, jnp.asarray(batch["image"]))
        losses.append(float(metrics["loss"]))
    return Result(losses, {})


def _step_of_replicas(state: Any, images: jax.Array, num_replicas: int) -> Any:
    # Batch norm of Equinox does not run in `shard_map`, so replicas are an axis of
    # `vmap`. Each normalizes its own examples, and the running means are averaged.
    shares = images.reshape(num_replicas, -1, NUM_PIXELS)
    keys = keys_of_replicas(state["key"], num_replicas)

    def share_step(share: jax.Array, key: jax.Array) -> Any:
        after, metrics = train_step(
            {**state, "key": key}, share, lambda grads: jax.lax.pmean(grads, "replica")
        )
        return eqx.filter(after, eqx.is_array), metrics

    each, metrics = jax.vmap(share_step, axis_name="replica")(shares, keys)
    arrays = jax.tree.map(
        lambda leaf: leaf.mean(axis=0) if eqx.is_inexact_array(leaf) else leaf[0], each
    )
    after = eqx.combine(arrays, eqx.filter(state, eqx.is_array, inverse=True))
    return after, jax.tree.map(jnp.mean, metrics)


def make_trainer(strategy: armillary.distribute.Strategy) -> armillary.StepTrainer:
    def step(state: Any, batch: Any) -> Any:
        return train_step(
            state, batch["image"], lambda grads: armillary.all_reduce("mean", grads)
        )

    return armillary.StepTrainer(step, make_state(), source_of(DATA), strategy=strategy)


PORT = Port(run_original, make_trainer)
