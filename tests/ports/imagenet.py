"""A residual network of Flax Linen, written for `jax.pmap`.

The model names the axis of replicas: its batch norm has the statistics of all of them.
With `DynamicScale`, gradients of half precision are scaled, and steps with an infinite
one change nothing but the scale.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax.training import dynamic_scale
from flax.training.train_state import TrainState

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

TRAIN = make_images(NUM_STEPS * BATCH_SIZE, channels=3)
TEST = make_images(22, channels=3)


class Block(nn.Module):
    """Two convolutions, and a connection around them."""

    norm: Any
    dtype: Any

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        y = nn.relu(self.norm()(x))
        y = nn.Conv(8, (3, 3), use_bias=False, dtype=self.dtype)(y)
        # The block begins as the identity.
        y = self.norm(scale_init=nn.initializers.zeros_init())(y)
        return nn.relu(x + y)


class ResNet(nn.Module):
    """A stem, one block, and the classifier."""

    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        norm = functools.partial(
            nn.BatchNorm,
            use_running_average=not train,
            momentum=0.9,
            dtype=self.dtype,
            axis_name="batch",
        )
        x = nn.Conv(8, (3, 3), use_bias=False, dtype=self.dtype)(x)
        x = Block(norm, self.dtype)(x)
        x = jnp.mean(x, axis=(1, 2))
        return jnp.asarray(nn.Dense(3, dtype=self.dtype)(x), jnp.float32)


class State(TrainState):
    """The state of Flax, and two parts more."""

    batch_stats: Any
    dynamic_scale: dynamic_scale.DynamicScale | None


def make_state(dtype: Any) -> State:
    model = ResNet(dtype)
    init = jax.jit(functools.partial(model.init, train=False))
    variables = init(jax.random.key(0), TRAIN["image"][:1])
    is_half = dtype == jnp.float16
    rates = optax.cosine_decay_schedule(0.1, NUM_STEPS)
    return State.create(
        apply_fn=model.apply,
        params=variables["params"],
        batch_stats=variables["batch_stats"],
        tx=optax.sgd(rates, momentum=0.9, nesterov=True),
        dynamic_scale=dynamic_scale.DynamicScale() if is_half else None,
    )


def losses_of(logits: jax.Array, labels: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels)


def train_step(state: State, batch: Any) -> tuple[State, Any]:
    def loss_fn(params: Any) -> tuple[jax.Array, Any]:
        logits, new = state.apply_fn(
            {"params": params, "batch_stats": state.batch_stats},
            batch["image"],
            train=True,
            mutable=["batch_stats"],
        )
        kernels = [leaf for leaf in jax.tree.leaves(params) if leaf.ndim > 1]
        penalty = sum(jnp.sum(kernel**2) for kernel in kernels)
        loss = jnp.mean(losses_of(logits, batch["label"])) + 5e-5 * penalty
        return loss, (new, logits)

    scale, is_finite = state.dynamic_scale, None
    if scale is not None:
        # It averages over the axis by itself.
        grad_fn = scale.value_and_grad(loss_fn, has_aux=True, axis_name="batch")
        scale, is_finite, (loss, (new, logits)), grads = grad_fn(state.params)
    else:
        grad_fn = jax.value_and_grad(loss_fn, has_aux=True)
        (loss, (new, logits)), grads = grad_fn(state.params)
        grads = jax.lax.pmean(grads, "batch")

    after = state.apply_gradients(grads=grads, batch_stats=new["batch_stats"])
    if is_finite is not None:
        keep = functools.partial(jnp.where, is_finite)
        after = after.replace(
            params=jax.tree.map(keep, after.params, state.params),
            opt_state=jax.tree.map(keep, after.opt_state, state.opt_state),
            dynamic_scale=scale,
        )
    accuracy = jnp.mean(logits.argmax(axis=-1) == batch["label"])
    metrics = {"loss": loss, "accuracy": accuracy}
    return after, jax.lax.pmean(metrics, "batch")


def evaluate(state: State, batch: Any) -> Any:
    variables = {"params": state.params, "batch_stats": state.batch_stats}
    logits = state.apply_fn(variables, batch["image"], train=False)
    return {
        "loss": losses_of(logits, batch["label"]),
        "accuracy": logits.argmax(axis=-1) == batch["label"],
    }


def run_original(num_replicas: int, dtype: Any) -> Result:
    compiled = on_replicas(train_step, num_replicas)
    state, losses = make_state(dtype), []
    for batch in batches_of(TRAIN):
        state, metrics = compiled(state, batch)
        losses.append(float(metrics["loss"]))

    values = jax.jit(evaluate)(state, TEST)
    return Result(losses, {name: float(np.mean(v)) for name, v in values.items()})


def make_trainer(
    strategy: armillary.distribute.Strategy, dtype: Any
) -> armillary.StepTrainer:
    return armillary.StepTrainer(
        train_step, make_state(dtype), source_of(TRAIN), strategy=strategy
    )


def make_evaluator(trainer: armillary.StepTrainer) -> armillary.StepEvaluator:
    data = armillary.data.from_arrays(TEST, batch_size=8)
    return armillary.StepEvaluator(evaluate, trainer, data)


def make_port(dtype: Any, tolerance: float) -> Port:
    return Port(
        functools.partial(run_original, dtype=dtype),
        functools.partial(make_trainer, dtype=dtype),
        make_evaluator,
        axis_name="batch",
        tolerance=tolerance,
    )


PORT = make_port(jnp.float32, tolerance=1e-6)
HALF_PORT = make_port(jnp.float16, tolerance=1e-3)
