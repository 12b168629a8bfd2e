"""Reductions over replicas that a step calls."""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from armillary._checks import check_callable, check_one_of
from armillary.distribute.replica._arithmetic import check_wire_dtype
from armillary.distribute.replica._context import (
    require_replica_context,
)
from armillary.distribute.replica._gradient import split_aux
from armillary.distribute.replica._values import ReduceOp
from armillary.state._adapters import is_tree_node
from armillary.state._lift import State
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
    leaves, treedef = jax.tree.flatten(tree, is_leaf=is_tree_node)
    state = State([(leaf, "") for leaf in leaves if is_tree_node(leaf)])
    before = state.read()
    shared = [_share(leaf, axis_name) for leaf in before]
    state.write(shared)
    try:
        yield treedef.unflatten(
            leaf if is_tree_node(leaf) else _share(leaf, axis_name) for leaf in leaves
        )
    finally:
        # Arrays that the loss function has written stay, such as batch statistics.
        rows = zip(state.read(), shared, before, strict=True)
        state.write([old if now is new else now for now, new, old in rows])


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _shared(axis_name: str, value: Any) -> Any:
    """Returns a value that is equal on all replicas."""
    del axis_name
    return value


@_shared.defjvp
def _shared_jvp(axis_name: str, values: Any, tangents: Any) -> Any:
    [value] = values
    [tangent] = tangents
    # A mean of equal tangents changes nothing. In the backward pass, the transpose of
    # the loss' sum multiplies gradients by the number of replicas, and the transpose of
    # this mean divides them again.
    return _shared(axis_name, value), jax.lax.pmean(tangent, axis_name)


def _share(leaf: Any, axis_name: str) -> Any:
    """Returns a leaf with its derivatives summed; leaves without any stay the same."""
    is_array = isinstance(leaf, jax.Array)
    is_float = is_array and jnp.issubdtype(leaf.dtype, jnp.inexact)
    return _shared(axis_name, leaf) if is_float else leaf
