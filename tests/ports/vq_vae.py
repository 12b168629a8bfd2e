"""An autoencoder with a codebook, which follows its data by moving averages.

The codebook is no parameter: it is the quotient of two averages of sums over the batch,
each with a count of its updates.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import armillary
from tests.ports.port import (
    BATCH_SIZE,
    NUM_STEPS,
    Arrays,
    Port,
    Result,
    batches_of,
    on_replicas,
    source_of,
)

NUM_PIXELS, NUM_CODES, WIDTH = 12, 6, 4
DECAY, COMMITMENT, EPSILON = 0.9, 0.25, 1e-5
OPTIMIZER = optax.adam(0.01)


def make_images(num_images: int, seed: int) -> Arrays:
    """Returns rows around three centers."""
    rng = np.random.default_rng(seed)
    centers = np.random.default_rng(9).normal(size=(3, NUM_PIXELS))
    rows = centers[rng.integers(0, 3, num_images)]
    rows = rows + 0.3 * rng.normal(size=rows.shape)
    return {"image": rows.astype(np.float32)}


TRAIN = make_images(NUM_STEPS * BATCH_SIZE, seed=0)
TEST = make_images(21, seed=1)
VARIANCE = float(TRAIN["image"].var())


def make_average(shape: tuple[int, ...]) -> dict[str, jax.Array]:
    zeros = jnp.zeros(shape)
    return {"hidden": zeros, "average": zeros, "count": jnp.zeros((), jnp.int32)}


def update_average(state: dict[str, jax.Array], value: jax.Array) -> Any:
    """Returns a moving average that does not lean to its beginning, zero."""
    count = state["count"] + 1
    hidden = DECAY * state["hidden"] + (1 - DECAY) * value
    return {"hidden": hidden, "average": hidden / (1 - DECAY**count), "count": count}


def make_state() -> dict[str, Any]:
    keys = jax.random.split(jax.random.key(0), 5)
    shapes = {
        "first": (NUM_PIXELS, 16),
        "to_codes": (16, WIDTH),
        "from_codes": (WIDTH, 16),
        "last": (16, NUM_PIXELS),
    }
    params = {
        name: 0.3 * jax.random.normal(key, shape)
        for key, (name, shape) in zip(keys, shapes.items(), strict=False)
    }
    codes = {
        "vectors": jax.random.normal(keys[-1], (NUM_CODES, WIDTH)),
        "uses": make_average((NUM_CODES,)),
        "sums": make_average((NUM_CODES, WIDTH)),
    }
    return {"params": params, "codes": codes, "optimizer": OPTIMIZER.init(params)}


def quantize(codes: Any, encoded: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the closest code of each vector, and which one it is."""
    vectors = codes["vectors"]
    distances = ((encoded[:, None] - vectors[None]) ** 2).sum(axis=-1)
    chosen = jax.nn.one_hot(distances.argmin(axis=1), NUM_CODES)
    return chosen @ vectors, chosen


def encode(params: Any, image: jax.Array) -> jax.Array:
    return jax.nn.relu(image @ params["first"]) @ params["to_codes"]


def errors_of(params: Any, quantized: jax.Array, image: jax.Array) -> jax.Array:
    """Returns the error of each image, in units of the variance of the data."""
    hidden = jax.nn.relu(quantized @ params["from_codes"])
    return ((hidden @ params["last"] - image) ** 2).mean(axis=1) / VARIANCE


def train_step(
    state: Any,
    image: jax.Array,
    add: Callable[[Any], Any],
    average: Callable[[Any], Any],
) -> Any:
    """Descends by the gradient, and moves the codes to the vectors that chose them.

    Args:
        state: The parameters, the codes and the state of the optimizer.
        image: The images of a replica.
        add: Returns the sum over replicas.
        average: Returns the mean over replicas.
    """
    codes = state["codes"]

    def loss_fn(params: Any) -> Any:
        encoded = encode(params, image)
        quantized, chosen = quantize(codes, encoded)
        distance = jnp.mean((jax.lax.stop_gradient(quantized) - encoded) ** 2)
        # The gradient passes by the choice of a code.
        passed = encoded + jax.lax.stop_gradient(quantized - encoded)
        loss = errors_of(params, passed, image).mean() + COMMITMENT * distance
        return loss, (encoded, chosen)

    grad_fn = jax.value_and_grad(loss_fn, has_aux=True)
    (loss, (encoded, chosen)), grads = grad_fn(state["params"])
    updates, optimizer = OPTIMIZER.update(average(grads), state["optimizer"])

    uses = update_average(codes["uses"], add(chosen.sum(axis=0)))
    sums = update_average(codes["sums"], add(chosen.T @ encoded))
    total = uses["average"].sum()
    smooth = (uses["average"] + EPSILON) / (total + NUM_CODES * EPSILON) * total
    after = {
        "params": optax.apply_updates(state["params"], updates),
        "codes": {
            "vectors": sums["average"] / smooth[:, None],
            "uses": uses,
            "sums": sums,
        },
        "optimizer": optimizer,
    }
    shares = average(chosen.mean(axis=0))
    entropy = -(shares * jnp.log(shares + 1e-10)).sum()
    return after, {"loss": loss, "perplexity": jnp.exp(entropy)}


def evaluate(state: Any, image: jax.Array) -> jax.Array:
    params = state["params"]
    quantized, _ = quantize(state["codes"], encode(params, image))
    return errors_of(params, quantized, image)


def run_original(num_replicas: int) -> Result:
    def step(state: Any, image: jax.Array) -> Any:
        def add(value: Any) -> Any:
            return jax.lax.psum(value, "batch")

        def average(value: Any) -> Any:
            return jax.lax.pmean(value, "batch")

        after, metrics = train_step(state, image, add, average)
        return after, average(metrics)

    compiled = on_replicas(step, num_replicas)
    state, losses = make_state(), []
    for batch in batches_of(TRAIN):
        state, metrics = compiled(state, batch["image"])
        losses.append(float(metrics["loss"]))
    errors = jax.jit(evaluate)(state, TEST["image"])
    return Result(losses, {"error": float(errors.mean())})


def make_trainer(strategy: armillary.distribute.Strategy) -> armillary.StepTrainer:
    def step(state: Any, batch: Any) -> Any:
        return train_step(
            state,
            batch["image"],
            lambda value: armillary.all_reduce("sum", value),
            lambda value: armillary.all_reduce("mean", value),
        )

    return armillary.StepTrainer(
        step, make_state(), source_of(TRAIN), strategy=strategy
    )


def make_evaluator(trainer: armillary.StepTrainer) -> armillary.StepEvaluator:
    def step(state: Any, batch: Any) -> Any:
        return {"error": evaluate(state, batch["image"])}

    data = armillary.data.from_arrays(TEST, batch_size=8)
    return armillary.StepEvaluator(step, trainer, data)


PORT = Port(run_original, make_trainer, make_evaluator)
