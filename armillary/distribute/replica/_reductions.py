"""Reductions over replicas that a step calls, and the loss of one replica."""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.core import Tracer

from armillary._checks import check_callable, check_one_of, check_positive_int
from armillary._jaxpr import mark
from armillary.distribute.replica._arithmetic import check_wire_dtype
from armillary.distribute.replica._context import (
    get_replica_context,
    require_replica_context,
)
from armillary.distribute.replica._gradient import num_parts, split_aux
from armillary.distribute.replica._marks import AVERAGE, DIVISOR, WEIGHT
from armillary.distribute.replica._replica import ReplicaContext
from armillary.distribute.replica._values import ReduceOp, count_active
from armillary.errors import BatchSizeError
from armillary.state._lift import State
from armillary.state._nnx import is_node
from armillary.typing import PyTree

if TYPE_CHECKING:
    import optax

_INSTEAD = "combine what `run` returned with `strategy.reduce`"


def all_reduce(op: ReduceOp | str, tree: PyTree, *, dtype: Any = None) -> PyTree:
    """Combines values over replicas; every replica gets the result.

    A step calls this to combine the gradients of several replicas. With one replica, it
    changes nothing, so the same step runs under every strategy::

        loss, gradients = nnx.value_and_grad(loss_fn)(model)  # this replica's
        gradients = armillary.all_reduce("mean", gradients)  # of all replicas
        optimizer.update(model, gradients)

    `"mean"` fits a loss that is a mean over the examples of its replica, with any
    penalties. The result is exact, because all replicas have the same number of
    examples. `"sum"` fits a loss that is already divided by the global batch size, by
    `armillary.compute_average_loss` or by you. If all replicas hold data,
    `jax.lax.pmean(gradients, "replica")` and `psum` do the same.

    Args:
        op: `"mean"`, `"sum"`, `"max"` or `"min"`, or a member of
            `armillary.distribute.ReduceOp`. The last two have no derivative.
        tree: A pytree of arrays, of the same shapes on all replicas; it travels in one
            round. Replicas without data take no part.
        dtype: The dtype in which floats travel, such as `jnp.bfloat16` for half the
            bytes of float32. The result has the dtype of each value again. By default,
            values travel in their own dtype.

    Returns:
        The same pytree, with values that are equal on all replicas.

    Raises:
        ReplicaContextError: In cross-replica context.
        DoubleReductionError: When `run` has traced the step: if a sum adds up values
            that were already reduced, or a mean averages values that were already
            divided.
        ReplicaMismatchError: If the strategy has a `CrossDeviceOps` of your own, and
            its results may differ between replicas.
        ValueError: If `op` is not such a name, or `dtype` is not a dtype of floats.
    """
    reduce_op = ReduceOp.of(op, "op")
    context = require_replica_context("armillary.all_reduce", _INSTEAD)
    return context.all_reduce(reduce_op, tree, dtype=dtype)


def all_reduce_gradients(
    op: ReduceOp | str = "mean", *, dtype: Any = None
) -> "optax.GradientTransformationExtraArgs":
    """Returns `all_reduce` as the first transformation of an Optax optimizer.

    With it, a step for one device runs on many devices unchanged, as with Horovod's
    distributed optimizer::

        tx = optax.chain(armillary.all_reduce_gradients("mean"), optax.adam(1e-3))

    It comes first and outermost, before clipping, `optax.apply_if_finite` and
    `optax.MultiSteps`.

    Args:
        op: As for `all_reduce`.
        dtype: As for `all_reduce`.

    Raises:
        ValueError: If `op` is not such a name, or `dtype` is not a dtype of floats.
    """
    import optax  # It takes longer to import than all of this library.

    reduce_op = ReduceOp.of(op, "op")
    check_wire_dtype(dtype)

    def init(params: PyTree) -> optax.EmptyState:
        del params
        return optax.EmptyState()

    def update(
        updates: PyTree, state: Any, params: PyTree = None, **_: Any
    ) -> tuple[PyTree, Any]:
        del params
        return all_reduce(reduce_op, updates, dtype=dtype), state

    return optax.GradientTransformationExtraArgs(init, update)


def over_replicas(
    loss_fn: Callable[..., Any], op: ReduceOp | str = "mean", *, has_aux: bool = False
) -> Callable[..., Any]:
    """Returns the loss of the whole batch, combined from the losses of all replicas.

    Use it for algorithms that differentiate the loss themselves: L-BFGS and its line
    searches, SAM, Sophia, Polyak steps, Hessians. The value is equal on all replicas.
    So are its derivatives of every order, in forward and reverse mode, with respect to
    the first argument. Do not reduce them again::

        loss = armillary.over_replicas(loss_fn)
        value, gradients = jax.value_and_grad(loss)(params)
        updates, state = lbfgs.update(
            gradients, state, params, value=value, grad=gradients, value_fn=loss
        )

    Args:
        loss_fn: Computes the loss of this replica, a scalar. Its first argument is
            equal on all replicas: a pytree of arrays, or an NNX module. It may take any
            other arguments.
        op: `"mean"` or `"sum"`, as for `all_reduce`.
        has_aux: Whether `loss_fn` returns a pair of the loss and something else. The
            second value is not reduced.

    Returns:
        A function of the same arguments.

    Raises:
        TypeError: If `loss_fn` cannot be called.
        ValueError: If `op` is neither `"mean"` nor `"sum"`.
    """
    check_callable("loss_fn", loss_fn)
    check_one_of("has_aux", has_aux, (True, False))
    reduce_op = ReduceOp.of(op, "op")
    if reduce_op not in (ReduceOp.MEAN, ReduceOp.SUM):
        raise ValueError(
            f'`op` is {op!r:.60}, but the loss of a batch is the "mean" or the "sum" '
            'of the losses of its parts. Use `op="mean"` or `op="sum"`.'
        )

    @functools.wraps(loss_fn)
    def whole(shared: Any, *args: Any, **kwargs: Any) -> Any:
        context = require_replica_context("over_replicas", _INSTEAD)
        if context.axis_name is None:
            return loss_fn(shared, *args, **kwargs)
        with _sharing(shared, context.axis_name) as own:
            result = loss_fn(own, *args, **kwargs)
        loss, aux = split_aux(result, has_aux)
        total = context.all_reduce(reduce_op, loss)
        return (total, aux) if has_aux else total

    return whole


@contextmanager
def _sharing(tree: Any, axis_name: str) -> Iterator[Any]:
    """Gives a pytree whose derivatives are summed over all replicas."""
    leaves, treedef = jax.tree.flatten(tree, is_leaf=is_node)
    state = State([(leaf, "") for leaf in leaves if is_node(leaf)])
    before = state.read()
    after = [_share(leaf, axis_name) for leaf in before]
    state.write(after)
    try:
        yield treedef.unflatten(
            x if is_node(x) else _share(x, axis_name) for x in leaves
        )
    finally:
        pairs = zip(state.read(), after, before, strict=True)
        state.write([old if now is new else now for now, new, old in pairs])


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _shared(axis_name: str, value: Any) -> Any:
    """Returns a value that is equal on all replicas."""
    del axis_name
    return value


@_shared.defjvp
def _shared_jvp(axis_name: str, values: Any, tangents: Any) -> Any:
    # A mean of equal tangents changes nothing. In the backward pass, the transpose of
    # the loss' sum multiplies gradients by the number of replicas, and the transpose of
    # this mean divides them again.
    return _shared(axis_name, *values), jax.lax.pmean(tangents[0], axis_name)


def _share(leaf: Any, axis_name: str) -> Any:
    is_array = isinstance(leaf, jax.Array)
    is_float = is_array and jnp.issubdtype(leaf.dtype, jnp.inexact)
    return _shared(axis_name, leaf) if is_float else leaf


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
    if sample_weight is not None:
        losses = losses * _weights(sample_weight, losses, "sample_weight")
    context = get_replica_context()
    if global_batch_size is None:
        context = require_replica_context(
            "compute_average_loss", "pass `global_batch_size=...` here"
        )
        divisor = losses.shape[0] * context.num_active
    else:
        size = _check_global_batch_size(global_batch_size)
        if context is not None and isinstance(size, int):
            _check_share(size, losses.shape[0], context)
        divisor = size if num_parts() == 1 else size / num_parts()
    if context is not None:
        context.was_asked = True  # Any divisor depends on the number of replicas.
    # In half precision a sum overflows soon, and a divisor of 65,520 is infinite.
    total = jnp.sum(losses.astype(jnp.promote_types(losses.dtype, jnp.float32)))
    return mark(_divide(total, divisor).astype(losses.dtype), AVERAGE)


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
    num_replicas = count_active(context.active)
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
    penalty = jnp.sum(_as_array("regularization_loss", regularization_loss))
    return _divide(penalty, count_active(context.active))


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
    weights = jnp.broadcast_to(_weights(weights, losses, "weights"), losses.shape)
    wide = jnp.promote_types(losses.dtype, jnp.float32)
    total = jnp.sum((losses * weights).astype(wide))
    weight = context.all_reduce("mean", jnp.sum(weights.astype(wide)))
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
            "an array of numbers. Pass an array that is computed from the batch."
        ) from error


def _as_floats(name: str, value: Any) -> jax.Array:
    array = _as_array(name, value)
    is_float = jnp.issubdtype(array.dtype, jnp.floating)
    return array if is_float else array.astype(jnp.result_type(float))


def _weights(given: Any, losses: jax.Array, name: str) -> jax.Array:
    weights = _as_array(name, given, losses.dtype)
    if weights.shape != losses.shape[: weights.ndim]:
        raise ValueError(
            f"`{name}` has shape {weights.shape}, but it must be the first axes of the "
            f"losses, shape {losses.shape}. Use one weight per example."
        )
    return weights.reshape(weights.shape + (1,) * (losses.ndim - weights.ndim))
