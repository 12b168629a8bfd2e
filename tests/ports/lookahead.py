"""Optax' lookahead with functional NNX: slow parameters follow fast ones."""

from typing import Any

import jax
import numpy as np
import optax
from flax import nnx

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
TEST = make_images(21)
OPTIMIZER = optax.lookahead(optax.adam(0.01), sync_period=3, slow_step_size=0.5)


class CNN(nnx.Module):
    """A small convolutional classifier."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.conv = nnx.Conv(1, 4, (3, 3), rngs=rngs)
        self.output = nnx.Linear(64, 3, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = nnx.max_pool(nnx.relu(self.conv(x)), (2, 2), (2, 2))
        return self.output(x.reshape(x.shape[0], -1))


GRAPH, PARAMS = nnx.split(CNN(nnx.Rngs(0)))


def losses_of(params: Any, batch: Any) -> tuple[jax.Array, jax.Array]:
    logits = nnx.merge(GRAPH, params)(batch["image"])
    labels = batch["label"]
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    return losses, logits.argmax(axis=-1) == labels


def loss_fn(params: Any, batch: Any) -> jax.Array:
    return losses_of(params, batch)[0].mean()


def make_state() -> tuple[optax.LookaheadParams, Any]:
    params = optax.LookaheadParams.init_synced(PARAMS)
    return params, OPTIMIZER.init(params)


def run_original(num_replicas: int) -> Result:
    @jax.jit
    def train_step(params: Any, opt_state: Any, batch: Any) -> Any:
        loss, grads = jax.value_and_grad(loss_fn)(params.fast, batch)
        updates, opt_state = OPTIMIZER.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    params, opt_state = make_state()
    losses = []
    for batch in batches_of(TRAIN):
        params, opt_state, loss = train_step(params, opt_state, batch)
        losses.append(float(loss))

    values, is_right = jax.jit(losses_of)(params.slow, TEST)
    return Result(losses, {"loss": np.mean(values), "accuracy": np.mean(is_right)})


def train_step(state: Any, batch: Any) -> Any:
    params, opt_state = state
    loss, grads = jax.value_and_grad(loss_fn)(params.fast, batch)
    grads = armillary.all_reduce("mean", grads)
    updates, opt_state = OPTIMIZER.update(grads, opt_state, params)
    return (optax.apply_updates(params, updates), opt_state), {"loss": loss}


def make_trainer(strategy: armillary.distribute.Strategy) -> armillary.StepTrainer:
    return armillary.StepTrainer(
        train_step, make_state(), source_of(TRAIN), strategy=strategy
    )


def make_evaluator(trainer: armillary.StepTrainer) -> armillary.StepEvaluator:
    def evaluate(state: Any, batch: Any) -> Any:
        losses, is_right = losses_of(state[0].slow, batch)
        return {"loss": losses, "accuracy": is_right}

    data = armillary.data.from_arrays(TEST, batch_size=8)
    return armillary.StepEvaluator(evaluate, trainer, data)


PORT = Port(run_original, make_trainer, make_evaluator)
