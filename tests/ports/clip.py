"""Contrastive training of images and texts, whose negatives are the global batch.

Each replica compares the images and texts of all replicas. The temperature of the
comparison is a parameter, and the dropout of a step comes from a key of the loop.
"""

from collections.abc import Callable
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
    Arrays,
    Port,
    Result,
    batches_of,
    keys_of_replicas,
    on_replicas,
    source_of,
)

NUM_WORDS, LENGTH, WIDTH = 11, 5, 8


def make_pairs(num_pairs: int, seed: int) -> Arrays:
    """Returns texts, and images that count the words of their texts."""
    rng = np.random.default_rng(seed)
    words = rng.integers(0, NUM_WORDS, (num_pairs, LENGTH))
    counts = np.eye(NUM_WORDS)[words].sum(axis=1)
    image = counts + 0.1 * rng.normal(size=counts.shape)
    return {"image": image.astype(np.float32), "words": words.astype(np.int32)}


TRAIN = make_pairs(NUM_STEPS * BATCH_SIZE, seed=0)
TEST = make_pairs(21, seed=1)


class TwoTowers(nn.Module):
    """Returns vectors of length 1 for images and texts, and the temperature."""

    @nn.compact
    def __call__(self, image: jax.Array, words: jax.Array, train: bool) -> Any:
        of_image = nn.Dense(WIDTH)(nn.gelu(nn.Dense(16)(image)))
        of_words = nn.Embed(NUM_WORDS, WIDTH)(words)
        of_words = nn.Dropout(0.1, deterministic=not train)(of_words)
        of_words = nn.Dense(WIDTH)(of_words.mean(axis=1))
        temperature = self.param("temperature", nn.initializers.constant(1.0), ())
        vectors = jax.tree.map(normalize, (of_image, of_words))
        return vectors, jnp.exp(temperature)


def normalize(vectors: jax.Array) -> jax.Array:
    return vectors / jnp.linalg.norm(vectors, axis=-1, keepdims=True)


def make_state() -> TrainState:
    model = TwoTowers()
    first = {name: rows[:1] for name, rows in TRAIN.items()}
    params = model.init(jax.random.key(0), **first, train=False)["params"]
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(0.01))
    return TrainState.create(apply_fn=model.apply, params=params, tx=tx)


def contrastive_loss(images: jax.Array, texts: jax.Array, scale: jax.Array) -> Any:
    """Returns the loss of finding each text by its image, and the reverse."""
    logits = scale * images @ texts.T
    labels = jnp.arange(len(images))
    losses_of = optax.softmax_cross_entropy_with_integer_labels
    losses = losses_of(logits, labels) + losses_of(logits.T, labels)
    return losses.mean() / 2, (logits.argmax(axis=1) == labels).mean()


def loss_and_grads(
    state: TrainState, batch: Any, key: jax.Array, gather: Callable[[Any], Any]
) -> Any:
    """Returns the loss with the accuracy, and the gradients.

    Args:
        state: The parameters.
        batch: The images and texts of a replica.
        key: The key of its dropout.
        gather: Returns the vectors of all replicas.
    """

    def loss_fn(params: Any) -> Any:
        variables = {"params": params}
        rngs = {"dropout": key}
        vectors, scale = state.apply_fn(variables, **batch, train=True, rngs=rngs)
        return contrastive_loss(*gather(vectors), scale)

    return jax.value_and_grad(loss_fn, has_aux=True)(state.params)


def similarities(state: TrainState, batch: Any) -> jax.Array:
    variables = {"params": state.params}
    (images, texts), _ = state.apply_fn(variables, **batch, train=False)
    return (images * texts).sum(axis=-1)


def run_original(num_replicas: int) -> Result:
    def gather(vectors: Any) -> Any:
        return jax.lax.all_gather(vectors, "batch", tiled=True)

    def train_step(state: TrainState, batch: Arrays, keys: jax.Array) -> Any:
        dropout = jax.random.fold_in(keys[0], state.step)
        (loss, _), grads = loss_and_grads(state, batch, dropout, gather)
        loss, grads = jax.lax.pmean((loss, grads), "batch")
        return state.apply_gradients(grads=grads), loss

    compiled = on_replicas(train_step, num_replicas)
    state, losses = make_state(), []
    keys = keys_of_replicas(jax.random.key(1), num_replicas)
    for batch in batches_of(TRAIN):
        state, loss = compiled(state, batch, keys)
        losses.append(float(loss))
    similarity = jax.jit(similarities)(state, TEST).mean()
    return Result(losses, {"similarity": float(similarity)})


def train_step(state: Any, batch: Any) -> Any:
    context = armillary.get_replica_context()

    def gather(vectors: Any) -> Any:
        return context.all_gather(vectors, axis=0)

    train: TrainState = state["train"]
    dropout = jax.random.fold_in(state["dropout"], train.step)
    (loss, accuracy), grads = loss_and_grads(train, batch, dropout, gather)
    grads = armillary.all_reduce("mean", grads)
    after = {**state, "train": train.apply_gradients(grads=grads)}
    return after, {"loss": loss, "accuracy": accuracy}


def make_trainer(strategy: armillary.distribute.Strategy) -> armillary.StepTrainer:
    state = {"train": make_state(), "dropout": jax.random.key(1)}
    return armillary.StepTrainer(train_step, state, source_of(TRAIN), strategy=strategy)


def make_evaluator(trainer: armillary.StepTrainer) -> armillary.StepEvaluator:
    def evaluate(state: Any, batch: Any) -> Any:
        return {"similarity": similarities(state["train"], batch)}

    data = armillary.data.from_arrays(TEST, batch_size=8)
    return armillary.StepEvaluator(evaluate, trainer, data)


PORT = Port(run_original, make_trainer, make_evaluator)
