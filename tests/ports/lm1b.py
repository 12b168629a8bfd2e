"""A language model of Flax Linen, whose metrics are sums that are divided in the end.

Texts have different lengths, so the loss is a sum over words, divided by their number.
The dropout of a step comes from one key, folded with the number of the step.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax.training.train_state import TrainState

import armillary
from armillary.metrics import Ratio
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

NUM_WORDS, LENGTH, WIDTH = 17, 6, 8


def make_texts(num_texts: int, seed: int) -> Arrays:
    """Returns texts of 1 to `LENGTH` words; 0 stands after the last one."""
    rng = np.random.default_rng(seed)
    words = rng.integers(1, NUM_WORDS, (num_texts, LENGTH))
    lengths = rng.integers(1, LENGTH + 1, (num_texts, 1))
    return {"words": np.where(np.arange(LENGTH) < lengths, words, 0).astype(np.int32)}


TRAIN = make_texts(NUM_STEPS * BATCH_SIZE, seed=0)
TEST = make_texts(21, seed=1)


class LanguageModel(nn.Module):
    """Predicts each word from the words before it."""

    @nn.compact
    def __call__(self, words: jax.Array, train: bool) -> jax.Array:
        embed = nn.Embed(NUM_WORDS, WIDTH)
        before = jnp.pad(words, ((0, 0), (1, 0)))[:, :-1]
        place = self.param("place", nn.initializers.normal(0.02), (1, LENGTH, WIDTH))
        x = nn.Dropout(0.2, deterministic=not train)(embed(before) + place)
        mask = nn.make_causal_mask(words)
        x = x + nn.MultiHeadDotProductAttention(2)(nn.LayerNorm()(x), mask=mask)
        y = nn.relu(nn.Dense(16)(nn.LayerNorm()(x)))
        x = x + nn.Dense(WIDTH)(nn.Dropout(0.2, deterministic=not train)(y))
        return embed.attend(nn.LayerNorm()(x))


def make_state() -> TrainState:
    model = LanguageModel()
    init = jax.jit(functools.partial(model.init, train=False))
    params = init(jax.random.key(0), TRAIN["words"][:1])["params"]
    tx = optax.adamw(optax.linear_schedule(0.02, 0.01, NUM_STEPS), weight_decay=0.1)
    return TrainState.create(apply_fn=model.apply, params=params, tx=tx)


def sums_of(state: TrainState, params: Any, words: Any, key: Any = None) -> Any:
    """Returns the sum of losses, the number of right words, and of all words."""
    rngs = None if key is None else {"dropout": key}
    logits = state.apply_fn({"params": params}, words, key is not None, rngs=rngs)
    weights = (words > 0).astype(jnp.float32)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, words)
    is_right = logits.argmax(axis=-1) == words
    return jnp.sum(losses * weights), jnp.sum(is_right * weights), jnp.sum(weights)


def summarize(sums: Any) -> dict[str, float]:
    loss, right, count = (float(each) for each in sums)
    return {
        "loss": loss / count,
        "accuracy": right / count,
        "perplexity": float(np.exp(loss / count)),
    }


def run_original(num_replicas: int) -> Result:
    def train_step(state: TrainState, words: jax.Array, keys: jax.Array) -> Any:
        # On several replicas, each has a dropout of its own.
        dropout = jax.random.fold_in(keys[0], state.step)

        def loss_fn(params: Any) -> Any:
            sums = sums_of(state, params, words, dropout)
            count = jax.lax.psum(sums[2], "batch")
            return sums[0] / count, sums

        (_, sums), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
        grads, sums = jax.lax.psum((grads, sums), "batch")
        return state.apply_gradients(grads=grads), sums

    @jax.jit
    def eval_step(state: TrainState, words: jax.Array) -> Any:
        return sums_of(state, state.params, words)

    compiled = on_replicas(train_step, num_replicas)
    state, losses = make_state(), []
    keys = keys_of_replicas(jax.random.key(1), num_replicas)
    for batch in batches_of(TRAIN):
        state, sums = compiled(state, batch["words"], keys)
        losses.append(summarize(sums)["loss"])

    totals = np.zeros(3)
    for start in range(0, 21, 8):
        totals += np.array(eval_step(state, TEST["words"][start : start + 8]))
    return Result(losses, summarize(totals))


def to_metrics(sums: Any) -> dict[str, Ratio]:
    loss, right, count = sums
    return {"loss": Ratio(loss, count), "accuracy": Ratio(right, count)}


def add_perplexity(metrics: dict[str, Any], state: Any) -> dict[str, Any]:
    return {"perplexity": np.exp(metrics["loss"])}


def train_step(state: Any, batch: Any) -> Any:
    train: TrainState = state["train"]
    # As a part of the state, the key gives each replica a dropout of its own.
    dropout = jax.random.fold_in(state["dropout"], train.step)

    def loss_fn(params: Any) -> Any:
        sums = sums_of(train, params, batch["words"], dropout)
        return sums[0] / armillary.all_reduce("sum", sums[2]), sums

    (_, sums), grads = jax.value_and_grad(loss_fn, has_aux=True)(train.params)
    grads = armillary.all_reduce("sum", grads)
    after = {**state, "train": train.apply_gradients(grads=grads)}
    return after, to_metrics(sums)


def make_trainer(strategy: armillary.distribute.Strategy) -> armillary.StepTrainer:
    return armillary.StepTrainer(
        train_step,
        {"train": make_state(), "dropout": jax.random.key(1)},
        source_of(TRAIN),
        strategy=strategy,
        loop_end=add_perplexity,
    )


def make_evaluator(trainer: armillary.StepTrainer) -> armillary.StepEvaluator:
    def evaluate(state: Any, batch: Any) -> Any:
        train = state["train"]
        return to_metrics(sums_of(train, train.params, batch["words"]))

    data = armillary.data.from_arrays(TEST, batch_size=8)
    return armillary.StepEvaluator(evaluate, trainer, data, loop_end=add_perplexity)


PORT = Port(run_original, make_trainer, make_evaluator)
