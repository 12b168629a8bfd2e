"""Reductions over replicas that a step says, as functions of its own words.

Inside `strategy.run` every value is the replica's own, so that what all replicas are to
have in common, such as an update of parameters, begins with one of these.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from armillary._checks import check_callable, check_one_of
from armillary.distribute.replica._context import require_replica_context
from armillary.distribute.replica._gradient import split_aux
from armillary.distribute.replica._values import AXIS_NAME, ReduceOp
from armillary.state._lift import State
from armillary.state._nnx import is_node
from armillary.typing import PyTree

if TYPE_CHECKING:
    import optax


_INSTEAD = "combine what `run` returned with `strategy.reduce`"


def all_reduce(op: ReduceOp | str, tree: PyTree, *, dtype: Any = None) -> PyTree:
    """Combines values over replicas; every replica gets the result.

    A step that runs on several replicas says in this way how their gradients become
    one, and with one replica it changes nothing, under every strategy::

        loss, gradients = nnx.value_and_grad(loss_fn)(model)  # this replica's
        gradients = armillary.all_reduce("mean", gradients)  # of all replicas
        optimizer.update(model, gradients)

    `"mean"` fits a loss that is a mean over the examples of its replica, with any
    penalties: the text that is right on one device. All replicas have equally many
    examples, so that it is exact for every batch. `"sum"` fits a loss that was divided
    already, by `armillary.compute_average_loss` or by you. `jax.lax.pmean(gradients,
    "replica")` and `psum` do the same where all replicas hold data.

    Args:
        op: `"mean"`, `"sum"`, `"max"` or `"min"`, or a member of `armillary.ReduceOp`.
            The last two have no derivative.
        tree: A pytree of arrays, of the same shapes on all replicas; it travels in one
            round. Replicas without data take no part.
        dtype: What floats travel in, such as `jnp.bfloat16` for half the bytes; by
            default their own, which the result has.

    Returns:
        The same pytree, with values that are equal on all replicas.

    Raises:
        ReplicaContextError: In cross-replica context.
        DoubleReductionError: When `run` has traced the step: if the sum is of what was
            reduced before, or the mean of what was divided before.
        ValueError: If `op` or `dtype` is none.
    """
    reduce_op = ReduceOp.of(op, "op")
    context = require_replica_context("armillary.all_reduce", _INSTEAD)
    return context.all_reduce(reduce_op, tree, dtype=dtype)


def all_reduce_gradients(
    op: ReduceOp | str = "mean", *, dtype: Any = None
) -> "optax.GradientTransformationExtraArgs":
    """Returns `all_reduce` as the first transformation of an Optax optimizer.

    So a step of one device runs on many without a changed line, as with Horovod's
    distributed optimizer::

        tx = optax.chain(armillary.all_reduce_gradients("mean"), optax.adam(1e-3))

    It comes first and outermost, before clipping, `optax.apply_if_finite` and
    `optax.MultiSteps`.

    Args:
        op: As for `all_reduce`.
        dtype: As for `all_reduce`.

    Raises:
        ValueError: If `op` is none.
    """
    import optax  # It takes longer to import than all of this library.

    reduce_op = ReduceOp.of(op, "op")

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
    """Returns the loss of the whole batch, made of the losses of all replicas.

    For what differentiates a loss itself: L-BFGS and its line searches, SAM, Sophia,
    Polyak steps, Hessians. The value is equal on all replicas, and so are its
    derivatives of every order, forwards and backwards, with respect to the first
    argument: nothing is left to reduce::

        loss = armillary.over_replicas(loss_fn)
        value, gradients = jax.value_and_grad(loss)(params)
        updates, state = lbfgs.update(
            gradients, state, params, value=value, grad=gradients, value_fn=loss
        )

    Args:
        loss_fn: Computes the loss of this replica, a scalar, from what is equal on all
            replicas, a pytree of arrays or an NNX module, and anything else.
        op: `"mean"` or `"sum"`, as for `all_reduce`.
        has_aux: Whether `loss_fn` returns a pair of the loss and something else, which
            stays this replica's.

    Returns:
        A function of the same arguments.

    Raises:
        TypeError: If `loss_fn` cannot be called.
        ValueError: If `op` is none of the two.
    """
    check_callable("loss_fn", loss_fn)
    check_one_of("has_aux", has_aux, (True, False))
    reduce_op = ReduceOp.of(op, "op")
    if reduce_op not in (ReduceOp.MEAN, ReduceOp.SUM):
        raise ValueError(
            f'`op` is {op!r:.60}, but the loss of a batch is the "mean" or the "sum" '
            "of those of its parts. Use one of the two."
        )

    @functools.wraps(loss_fn)
    def whole(shared: Any, *args: Any, **kwargs: Any) -> Any:
        context = require_replica_context("over_replicas", _INSTEAD)
        if context.axis_name is None:
            return loss_fn(shared, *args, **kwargs)
        with _sharing(shared) as own:
            result = loss_fn(own, *args, **kwargs)
        loss, aux = split_aux(result, has_aux)
        total = context.all_reduce(reduce_op, loss, dtype=jnp.result_type(loss))
        return (total, aux) if has_aux else total

    return whole


@contextmanager
def _sharing(tree: Any) -> Iterator[Any]:
    """Gives a pytree whose derivatives are those of all replicas."""
    leaves, treedef = jax.tree.flatten(tree, is_leaf=is_node)
    state = State([(leaf, "") for leaf in leaves if is_node(leaf)])
    before = state.read()
    after = list(map(_share, before))
    state.write(after)
    try:
        yield treedef.unflatten(x if is_node(x) else _share(x) for x in leaves)
    finally:
        pairs = zip(state.read(), after, before, strict=True)
        state.write([old if now is new else now for now, new, old in pairs])


def _share(leaf: Any) -> Any:
    is_array = isinstance(leaf, jax.Array)
    is_float = is_array and jnp.issubdtype(leaf.dtype, jnp.inexact)
    return _shared(leaf) if is_float else leaf


@jax.custom_jvp
def _shared(value: Any) -> Any:
    """Returns a value that is equal on all replicas."""
    return value


@_shared.defjvp
def _shared_jvp(values: Any, tangents: Any) -> Any:
    # A mean of equal tangents changes nothing. Its transpose is the mean of what the
    # transpose of the loss' sum has made larger by the number of replicas.
    return _shared(*values), jax.lax.pmean(tangents[0], AXIS_NAME)
