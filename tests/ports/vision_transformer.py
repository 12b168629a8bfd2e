"""A vision transformer of Flax Linen, written for `jax.pmap`.

Each replica draws its own dropout, by its number on the axis. A replica accumulates the
gradients of parts of its batch, and the momentum is held in bfloat16.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn

import armillary
from tests.ports.port import (
    BATCH_SIZE,
    NUM_STEPS,
    Port,
    Result,
    batches_of,
    make_images,
    on_replicas,
    source_of,
)

TRAIN = make_images(NUM_STEPS * BATCH_SIZE)
NUM_PARTS = 2
OPTIMIZER = optax.chain(
    optax.clip_by_global_norm(1.0),
    optax.sgd(0.1, momentum=0.9, accumulator_dtype=jnp.bfloat16),
)


class ViT(nn.Module):
    """Patches of an image as tokens, one block of attention, and the classifier."""

    @nn.compact
    def __call__(self, images: jax.Array, train: bool) -> jax.Array:
        width = 8
        x = nn.Conv(width, (4, 4), strides=(4, 4), name="embedding")(images)
        x = x.reshape(x.shape[0], -1, width)
        place = self.param("place", nn.initializers.normal(0.02), (1, 4, width))
        x = nn.Dropout(0.1, deterministic=not train)(x + place)
        y = nn.MultiHeadDotProductAttention(
            2, dropout_rate=0.1, broadcast_dropout=False, deterministic=not train
        )(nn.LayerNorm()(x))
        x = x + nn.Dropout(0.1, deterministic=not train)(y)
        y = nn.gelu(nn.Dense(16)(nn.LayerNorm()(x)))
        x = x + nn.Dense(width)(nn.Dropout(0.1, deterministic=not train)(y))
        return nn.Dense(3, name="head")(nn.LayerNorm()(x).mean(axis=1))


def accumulate(grad_fn: Any, params: Any, batch: Any) -> Any:
    """Returns the means of losses and gradients over parts of a batch."""
    parts = jax.tree.map(
        lambda each: each.reshape(NUM_PARTS, -1, *each.shape[1:]), batch
    )

    def add(index: Any, totals: Any) -> Any:
        part = jax.tree.map(lambda each: each[index], parts)
        return jax.tree.map(jnp.add, totals, grad_fn(params, part))

    first = grad_fn(params, jax.tree.map(lambda each: each[0], parts))
    totals = jax.lax.fori_loop(1, NUM_PARTS, add, first)
    return jax.tree.map(lambda total: total / NUM_PARTS, totals)


def make_step(axis_name: str) -> Any:
    def train_step(state: Any, batch: Any) -> Any:
        rng, now = jax.random.split(state["rng"])
        dropout = jax.random.fold_in(now, jax.lax.axis_index(axis_name))

        def loss_fn(params: Any, part: Any) -> jax.Array:
            logits = ViT().apply(
                {"params": params}, part["image"], True, rngs={"dropout": dropout}
            )
            targets = jax.nn.one_hot(part["label"], 3)
            return -jnp.mean(jnp.sum(jax.nn.log_softmax(logits) * targets, axis=-1))

        grad_fn = jax.value_and_grad(loss_fn)
        loss, grads = accumulate(grad_fn, state["params"], batch)
        loss, grads = jax.lax.pmean((loss, grads), axis_name)
        updates, opt_state = OPTIMIZER.update(grads, state["opt_state"])
        params = optax.apply_updates(state["params"], updates)
        after = {"params": params, "opt_state": opt_state, "rng": rng}
        return after, {"loss": loss}

    return train_step


def make_state() -> Any:
    init = jax.jit(functools.partial(ViT().init, train=False))
    params = init(jax.random.key(0), TRAIN["image"][:1])["params"]
    rng = jax.random.PRNGKey(1)
    return {"params": params, "opt_state": OPTIMIZER.init(params), "rng": rng}


def run_original(num_replicas: int) -> Result:
    compiled = on_replicas(make_step("batch"), num_replicas)
    state, losses = make_state(), []
    for batch in batches_of(TRAIN):
        state, metrics = compiled(state, batch)
        losses.append(float(metrics["loss"]))

    is_right = jax.jit(evaluate)(state, TRAIN)["accuracy"]
    return Result(losses, {"accuracy": float(np.mean(is_right))})


def evaluate(state: Any, batch: Any) -> Any:
    logits = ViT().apply({"params": state["params"]}, batch["image"], False)
    return {"accuracy": logits.argmax(axis=-1) == batch["label"]}


def make_trainer(strategy: armillary.distribute.Strategy) -> armillary.StepTrainer:
    return armillary.StepTrainer(
        make_step("replica"), make_state(), source_of(TRAIN), strategy=strategy
    )


def make_evaluator(trainer: armillary.StepTrainer) -> armillary.StepEvaluator:
    data = armillary.data.from_arrays(TRAIN, batch_size=9)
    return armillary.StepEvaluator(evaluate, trainer, data)


PORT = Port(run_original, make_trainer, make_evaluator, tolerance=1e-6)
