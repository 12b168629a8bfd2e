"""The step of a task as a pure function, as a hand-written JAX program has it.

The module is split once. Parameters are a plain list, which JAX flattens faster than
any other container, and the optimizer is plain Optax.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from benchmarks.models import make_model
from benchmarks.tasks import Batch, Task

Parameters: TypeAlias = list[jax.Array]
State: TypeAlias = tuple[Parameters, Any]

DTYPES = {"f32": jnp.float32, "bf16": jnp.bfloat16}
SEED = 0


@dataclass(frozen=True)
class Functional:
    """A task as functions.

    Attributes:
        state: Initial parameters and optimizer state.
        step: From state and batch to state and mean loss.
    """

    state: State
    step: Callable[[State, Batch], tuple[State, jax.Array]]


def make_optimizer(task: Task) -> optax.GradientTransformation:
    """Returns the task's Optax optimizer."""
    if task.optimizer == "adamw":
        return optax.adamw(task.learning_rate, weight_decay=task.weight_decay)
    if task.optimizer == "sgd":
        return optax.sgd(task.learning_rate)
    return optax.adam(task.learning_rate)


def mean_loss(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Returns the mean cross entropy, in float32 whatever the model computes in."""
    logits = logits.astype(jnp.float32)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    return jnp.mean(losses)


def make_functional(task: Task, dtype: str) -> Functional:
    """Returns a task's initial state and step."""
    model = make_model(task, nnx.Rngs(SEED), DTYPES[dtype])
    definition, parameters, rest = nnx.split(model, nnx.Param, ...)
    leaves, structure = jax.tree.flatten(parameters)
    optimizer = make_optimizer(task)

    def loss_fn(leaves: Parameters, batch: Batch) -> jax.Array:
        parameters = jax.tree.unflatten(structure, leaves)
        logits = nnx.merge(definition, parameters, rest)(batch)
        return mean_loss(logits, batch["label"])

    def step(state: State, batch: Batch) -> tuple[State, jax.Array]:
        leaves, optimizer_state = state
        loss, gradients = jax.value_and_grad(loss_fn)(leaves, batch)
        updates, optimizer_state = optimizer.update(gradients, optimizer_state, leaves)
        changed: Any = optax.apply_updates(leaves, updates)
        return (changed, optimizer_state), loss

    return Functional((leaves, optimizer.init(leaves)), step)
