"""The loss of one replica, scaled so that replicas can reduce its gradients.

Each function marks its divisor. `_proof` finds a reduction that does not fit the mark.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer

from armillary._checks import check_positive_int
from armillary._jaxpr import mark
from armillary.distribute.analysis._marks import AVERAGE, DIVISOR, WEIGHT
from armillary.distribute.replica._context import (
    get_replica_context,
    require_replica_context,
)
from armillary.distribute.replica._gradient import num_parts
from armillary.distribute.replica._replica import ReplicaContext
from armillary.errors import BatchSizeError


def compute_average_loss(
    per_example_loss: Any,
    sample_weight: Any = None,
    global_batch_size: Any = None,
) -> jax.Array:
    """Returns the sum of the losses divided by the global batch size.

    Args:
        per_example_loss: Losses of this replica's examples, shape `(batch, ...)`. Axes
            after the first are summed, not averaged, as in TensorFlow.
        sample_weight: Weights of shape `(batch,)`, or of any shape whose axes are the
            first ones of `per_example_loss`. Weights do not change the divisor.
        global_batch_size: Number of examples on all replicas: an integer, or an integer
            array of shape `()` that is equal on all replicas. If gradients are
            accumulated, it counts the examples of the whole batch. By default, it is
            the number of examples here times the number of replicas that hold data.

    Returns:
        An array of shape `()`. Its sum over replicas is the average over the batch.

    Raises:
        BatchSizeError: If `strategy.run` got more examples than `global_batch_size`.
        ReplicaContextError: In cross-replica context, without `global_batch_size`.
        ReplicaMismatchError: When `run` has traced the step: if `global_batch_size` is
            an array that may differ between replicas.
        ValueError: If a shape does not fit, or `global_batch_size` is not a positive
            integer.
    """
    losses = _as_floats("per_example_loss", per_example_loss)
    if losses.ndim == 0:
        raise ValueError(
            "`per_example_loss` has shape (), but it must have one entry per example, "
            "shape (batch, ...). Pass the losses before taking their mean."
        )
    num_losses = losses.shape[0]
    if sample_weight is not None:
        losses = losses * _weights(sample_weight, losses, "sample_weight")

    context = get_replica_context()
    if global_batch_size is None:
        context = require_replica_context(
            "compute_average_loss", "pass `global_batch_size=...` here"
        )
        divisor = num_losses * context.num_active
    else:
        size = _check_global_batch_size(global_batch_size)
        if context is not None and isinstance(size, int):
            _check_share(size, num_losses, context)
        # The losses of the parts are averaged, so each has its share of the divisor.
        divisor = size if num_parts() == 1 else size / num_parts()
    if context is not None:
        context.was_asked = True  # Any divisor depends on the number of replicas.

    # In half precision a sum overflows soon, and a divisor of 65,520 is infinite.
    wide = jnp.promote_types(losses.dtype, jnp.float32)
    total = jnp.sum(losses.astype(wide))
    average = _divide(total, divisor)
    return mark(average.astype(losses.dtype), AVERAGE)


def _check_global_batch_size(value: Any) -> Any:
    """Returns a number of examples: an `int`, or a traced integer."""
    if not isinstance(value, jax.Array):
        return check_positive_int("global_batch_size", value)
    if not jnp.issubdtype(value.dtype, jnp.integer) or value.shape != ():
        raise ValueError(
            f"`global_batch_size` is an array of {value.dtype}{list(value.shape)}, but "
            "it must be a positive integer, or an integer array of shape (). Pass the "
            "number of examples on all replicas."
        )
    if not isinstance(value, Tracer):
        return check_positive_int("global_batch_size", int(value))
    if num_parts() > 1:
        raise ValueError(
            "`global_batch_size` is an array, and gradients are accumulated over "
            f"{num_parts()} parts of the batch (`accumulate_steps`). Each part would "
            "need the number of examples of the whole batch. Pass an integer, or weigh "
            "examples with `sample_weight`."
        )
    return value


def _check_share(size: int, num_losses: int, context: ReplicaContext) -> None:
    """Raises if `run` got more examples than the loss is to be divided by."""
    share = context.share_size
    # Losses that do not count examples, such as losses of tokens, may have any divisor.
    # A larger number is for a short last batch, or for several accumulated steps.
    if share is None or num_losses * num_parts() != share:
        return
    num_replicas = len(context.active)
    whole = share * num_replicas
    if size < whole:
        raise BatchSizeError(
            f"`global_batch_size` of `compute_average_loss` is {size}, but "
            f"`strategy.run` got {whole} examples, {share} on each of {num_replicas} "
            f"replicas. The sum over replicas would be {whole / size:g} times too "
            f"large. Pass `global_batch_size={whole}`, or leave it out."
        )


def scale_regularization_loss(regularization_loss: Any) -> jax.Array:
    """Returns the sum of a regularization loss divided by the number of replicas.

    Every replica adds the same regularization loss, so their sum is the loss itself.

    Args:
        regularization_loss: An array of any shape; it is summed.

    Returns:
        An array of shape `()`.

    Raises:
        ReplicaContextError: In cross-replica context.
    """
    context = require_replica_context(
        "scale_regularization_loss", "divide by `strategy.num_replicas_in_sync` here"
    )
    # `num_active` would mark the context as asked, but this divisor says nothing about
    # the scale of any other loss.
    num_active = len(context.active)
    penalty = jnp.sum(_as_array("regularization_loss", regularization_loss))
    return _divide(penalty, num_active)


def weighted_mean(values: Any, weights: Any) -> jax.Array:
    """Returns this replica's part of the weighted mean over *all* replicas.

    Use it for losses with a mask, token counts or sample weights::

        loss = armillary.weighted_mean(token_losses, mask)
        gradients = armillary.all_reduce("mean", gradients)

    The mean of the parts over replicas is the sum of `values * weights` divided by the
    sum of `weights`, both over all replicas. The mean of the gradients is the gradient
    of this quotient. With plain `jnp.average(values, weights=weights)`, it would not
    be.

    Args:
        values: Losses of this replica's examples, shape `(batch, ...)`.
        weights: Their weights, of the shape of `values` or of its first axes.

    Returns:
        An array of shape `()`; 0 if all weights are 0, as with
        `tf.math.divide_no_nan`.

    Raises:
        ReplicaContextError: In cross-replica context.
        ValueError: If the shapes do not fit, or gradients are accumulated.
    """
    context = require_replica_context(
        "weighted_mean", "use `jnp.average(values, weights=weights)` here"
    )
    if num_parts() > 1:
        raise ValueError(
            "`weighted_mean` was called where gradients are accumulated "
            "(`accumulate_steps`), but the parts of a batch have different weights. "
            "Use `compute_average_loss(losses, sample_weight=...)`."
        )
    losses = _as_floats("values", values)
    weights = _weights(weights, losses, "weights")
    weights = jnp.broadcast_to(weights, losses.shape)

    # In half precision, a sum of many weights overflows or loses small ones.
    wide = jnp.promote_types(losses.dtype, jnp.float32)
    total = jnp.sum((losses * weights).astype(wide))
    weight = context.all_reduce("mean", jnp.sum(weights.astype(wide)))
    # The derivative of a quotient by 0 is NaN, even where `jnp.where` drops the value.
    divisor = mark(jnp.where(weight == 0, 1, weight), WEIGHT)
    mean = jnp.where(weight == 0, 0, total / divisor)
    return mean.astype(losses.dtype)


def _divide(total: jax.Array, count: Any) -> jax.Array:
    """Returns a quotient, with the mark by which `_proof` knows its divisor."""
    divisor = jnp.asarray(count, total.dtype)
    return total / mark(divisor, DIVISOR)


def _as_array(name: str, value: Any, dtype: Any = None) -> jax.Array:
    """Returns a value as an array; an error names the argument."""
    try:
        return jnp.asarray(value, dtype)
    except (TypeError, ValueError, OverflowError) as error:
        raise TypeError(
            f"`{name}` is {value!r:.80} of type {type(value).__name__}, but it must be "
            "an array of numbers. Pass an array that is computed from the batch."
        ) from error


def _as_floats(name: str, value: Any) -> jax.Array:
    """Returns an array of floats; integers and flags become JAX's usual float."""
    array = _as_array(name, value)
    is_float = jnp.issubdtype(array.dtype, jnp.floating)
    return array if is_float else array.astype(jnp.result_type(float))


def _weights(given: Any, losses: jax.Array, name: str) -> jax.Array:
    """Returns weights with as many axes as the losses have."""
    weights = _as_array(name, given, losses.dtype)
    if weights.shape != losses.shape[: weights.ndim]:
        raise ValueError(
            f"`{name}` has shape {weights.shape}, but it must be the first axes of the "
            f"losses, shape {losses.shape}. Use one weight per example."
        )
    num_missing = losses.ndim - weights.ndim
    return weights.reshape(weights.shape + (1,) * num_missing)
