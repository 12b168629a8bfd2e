"""Differentially private gradient descent: clipped gradients of examples, and noise."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from optax import contrib

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
# The parts of `contrib.dpsgd`, whose `seed` is deprecated.
OPTIMIZER = optax.chain(
    contrib.differentially_private_aggregate(
        l2_norm_clip=1.0, noise_multiplier=1.1, key=jax.random.key(7)
    ),
    optax.sgd(0.1),
)


def make_state() -> tuple[Any, Any]:
    first, last = jax.random.split(jax.random.key(0))
    params = {
        "first": 0.1 * jax.random.normal(first, (64, 8)),
        "last": 0.1 * jax.random.normal(last, (8, 3)),
    }
    return params, OPTIMIZER.init(params)


def loss_of_one(params: Any, image: jax.Array, label: jax.Array) -> jax.Array:
    logits = jnp.tanh(image.reshape(-1) @ params["first"]) @ params["last"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, label)


# The gradients of each example, along a first axis, and the losses.
GRAD_FN = jax.vmap(jax.value_and_grad(loss_of_one), in_axes=(None, 0, 0))


def run_original(num_replicas: int) -> Result:
    @jax.jit
    def train_step(params: Any, opt_state: Any, batch: Any) -> Any:
        losses, grads = GRAD_FN(params, batch["image"], batch["label"])
        updates, opt_state = OPTIMIZER.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, losses.mean()

    params, opt_state = make_state()
    losses = []
    for batch in batches_of(TRAIN):
        params, opt_state, loss = train_step(params, opt_state, batch)
        losses.append(float(loss))
    return Result(losses, {})


def train_step(state: Any, batch: Any) -> Any:
    params, opt_state = state
    losses, grads = GRAD_FN(params, batch["image"], batch["label"])
    # The optimizer adds noise once for all examples, so it needs all gradients.
    grads = armillary.get_replica_context().all_gather(grads, axis=0)
    updates, opt_state = OPTIMIZER.update(grads, opt_state, params)
    return (optax.apply_updates(params, updates), opt_state), {"loss": losses}


def make_trainer(strategy: armillary.distribute.Strategy) -> armillary.StepTrainer:
    return armillary.StepTrainer(
        train_step, make_state(), source_of(TRAIN), strategy=strategy
    )


PORT = Port(run_original, make_trainer)
