"""Gradient accumulation with `optax.MultiSteps`: one update for two batches."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

import armillary
from tests.ports.port import (
    BATCH_SIZE,
    NUM_STEPS,
    Port,
    Result,
    batches_of,
    make_images,
    source_of,
)

TRAIN = make_images(NUM_STEPS * BATCH_SIZE)
OPTIMIZER = optax.MultiSteps(optax.adam(0.01), every_k_schedule=2)


def make_state() -> tuple[Any, Any]:
    params = {"w": 0.1 * jax.random.normal(jax.random.key(0), (64, 3))}
    return params, OPTIMIZER.init(params)


def loss_fn(params: Any, batch: Any) -> jax.Array:
    logits = batch["image"].reshape(-1, 64) @ params["w"]
    labels = batch["label"]
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, labels))


def run_original(num_replicas: int) -> Result:
    @jax.jit
    def train_step(params: Any, opt_state: Any, batch: Any) -> Any:
        loss, grads = jax.value_and_grad(loss_fn)(params, batch)
        updates, opt_state = OPTIMIZER.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    params, opt_state = make_state()
    losses = []
    for batch in batches_of(TRAIN):
        params, opt_state, loss = train_step(params, opt_state, batch)
        losses.append(float(loss))
    return Result(losses, {})


def train_step(state: Any, batch: Any) -> Any:
    params, opt_state = state
    loss, grads = jax.value_and_grad(loss_fn)(params, batch)
    grads = armillary.all_reduce("mean", grads)
    updates, opt_state = OPTIMIZER.update(grads, opt_state, params)
    return (optax.apply_updates(params, updates), opt_state), {"loss": loss}


def make_trainer(strategy: armillary.distribute.Strategy) -> armillary.StepTrainer:
    return armillary.StepTrainer(
        train_step, make_state(), source_of(TRAIN), strategy=strategy
    )


PORT = Port(run_original, make_trainer)
