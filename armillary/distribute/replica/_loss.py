"""Losses as each replica's part of the loss of the whole batch.

`compute_average_loss` and `scale_regularization_loss` are those of `tf.nn`: parts whose
*sum* over replicas is the loss, so that gradients are summed. What they divide by is
marked, so that a mean of such gradients is found (`_differences`). The parts of
`weighted_mean` have the loss as their *mean*.
"""

from numbers import Integral
from typing import Any

import jax
import jax.numpy as jnp

from armillary._jaxpr import mark
from armillary.distribute.replica._context import (
    get_replica_context,
    require_replica_context,
)
from armillary.distribute.replica._differences import DIVISOR, WEIGHT
from armillary.distribute.replica._gradient import num_parts
from armillary.distribute.replica._values import count_active


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
        global_batch_size: Number of examples on all replicas, an integer or an integer
            array of shape `()`. By default the number of examples here times the number
            of replicas that hold data. Where gradients are accumulated, that of the
            whole batch, and an integer.

    Returns:
        An array of shape `()`. Its sum over replicas is the average over the batch.

    Raises:
        ReplicaContextError: In cross-replica context, without `global_batch_size`.
        ValueError: If a shape does not fit, or `global_batch_size` is not a positive
            integer of shape `()`.
    """
    losses = _as_floats("per_example_loss", per_example_loss)
    if losses.ndim == 0:
        raise ValueError(
            "`per_example_loss` has shape (), but it must have one entry per example, "
            "shape (batch, ...). Pass the losses before taking their mean."
        )
    if sample_weight is not None:
        losses = losses * _weights(sample_weight, losses, "sample_weight")
    context = get_replica_context()
    if global_batch_size is None:
        context = require_replica_context(
            "compute_average_loss", "pass `global_batch_size=...` here"
        )
        global_batch_size = losses.shape[0] * context.num_active
    else:
        _check_global_batch_size(global_batch_size)
        if num_parts() > 1:
            global_batch_size = global_batch_size / num_parts()
    if context is not None:
        context.was_asked = True  # Any divisor here is one for all replicas.
    # In half precision a sum overflows soon, and a divisor of 65,520 is infinite.
    total = jnp.sum(losses.astype(jnp.promote_types(losses.dtype, jnp.float32)))
    return _divide(total, global_batch_size).astype(losses.dtype)


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
    # Not `num_active`: this says nothing about the scale of any other loss.
    penalty = _as_array("regularization_loss", regularization_loss)
    return _divide(jnp.sum(penalty), count_active(context.active))


def weighted_mean(values: Any, weights: Any) -> jax.Array:
    """Returns this replica's part of the weighted mean over *all* replicas.

    For losses that a mask, the number of tokens or sample weights weigh::

        loss = armillary.weighted_mean(token_losses, mask)
        gradients = armillary.all_reduce("mean", gradients)

    The mean of the parts over replicas is the sum of `values * weights` divided by the
    sum of `weights`, both over all replicas, and so is the mean of their gradients. A
    plain `jnp.average(values, weights=weights)` would give each replica's examples the
    same say, however much they weigh. On one replica it is the plain weighted mean.

    Args:
        values: Losses of this replica's examples, shape `(batch, ...)`.
        weights: Their weights: of the shape of `values`, or of its first axes.

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
            "(`accumulate_steps`), but the parts of a batch weigh different amounts. "
            "Use `accumulate_steps=1`, or `compute_average_loss(losses, "
            "sample_weight=...)`."
        )
    losses = _as_floats("values", values)
    weights = jnp.broadcast_to(_weights(weights, losses, "weights"), losses.shape)
    wide = jnp.promote_types(losses.dtype, jnp.float32)
    total = jnp.sum((losses * weights).astype(wide))
    weight = context.all_reduce("mean", jnp.sum(weights.astype(wide)), dtype=wide)
    divisor = mark(jnp.where(weight == 0, 1, weight), WEIGHT)
    mean = jnp.where(weight == 0, 0, total / divisor)
    return mean.astype(losses.dtype)


def _divide(total: jax.Array, count: Any) -> jax.Array:
    return total / mark(jnp.asarray(count, total.dtype), DIVISOR)


def _as_array(name: str, value: Any, dtype: Any = None) -> jax.Array:
    try:
        return jnp.asarray(value, dtype)
    except (TypeError, ValueError, OverflowError) as error:
        raise TypeError(
            f"`{name}` is {value!r:.80} of type {type(value).__name__}, but it must be "
            "an array of numbers. Pass what is computed from the batch."
        ) from error


def _as_floats(name: str, value: Any) -> jax.Array:
    array = _as_array(name, value)
    is_float = jnp.issubdtype(array.dtype, jnp.floating)
    return array if is_float else array.astype(jnp.result_type(float))


def _weights(given: Any, losses: jax.Array, name: str) -> jax.Array:
    weights = _as_array(name, given, losses.dtype)
    if weights.shape != losses.shape[: weights.ndim]:
        raise ValueError(
            f"`{name}` has shape {weights.shape}, but it must be the first axes "
            f"of the losses, which have shape {losses.shape}. Use one weight per "
            f"example, shape {losses.shape[:1]}."
        )
    return weights.reshape(weights.shape + (1,) * (losses.ndim - weights.ndim))


def _check_global_batch_size(value: Any) -> None:
    is_array = isinstance(value, jax.Array)
    if is_array and num_parts() > 1:
        raise ValueError(
            "`global_batch_size` is an array, and the loss is accumulated over "
            f"{num_parts()} parts of the batch (`accumulate_steps`), which would all "
            "need the number of the whole batch. Pass an integer, or weigh examples "
            "with `sample_weight`."
        )
    if is_array and jnp.issubdtype(value.dtype, jnp.integer) and value.shape == ():
        return
    if isinstance(value, Integral) and not isinstance(value, bool) and int(value) > 0:
        return
    raise ValueError(
        f"`global_batch_size` is {value!r}, but it must be a positive integer, or an "
        "integer array of shape (). Pass the number of examples on all replicas."
    )
