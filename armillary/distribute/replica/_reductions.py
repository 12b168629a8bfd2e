"""Reductions over replicas that a step says, and how sums over replicas are made.

Inside `strategy.run` every value is the replica's own, so that what all replicas are to
have in common, such as an update of parameters, begins with one of these. Sums are made
in XLA's own way or in that of a `CrossDeviceOps`, which `ReplicaContext` asks for those
of `all_reduce` and of on-read state.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from armillary._checks import check_callable, check_one_of, is_positive_int
from armillary._jaxpr import mark
from armillary.distribute.replica._context import require_replica_context
from armillary.distribute.replica._differences import BY_OPS, MADE_BY_OPS
from armillary.distribute.replica._gradient import split_aux
from armillary.distribute.replica._values import AXIS_NAME, ReduceOp
from armillary.state._lift import State
from armillary.state._nnx import is_node
from armillary.typing import PyTree

if TYPE_CHECKING:
    import optax


class CrossDeviceOps:
    """The base of ways to sum over replicas (`tf.distribute.CrossDeviceOps`).

    A way of your own overrides `all_reduce`::

        class Ring(armillary.distribute.CrossDeviceOps):
            def all_reduce(self, value, axis_name, num_replicas):
                ring = [(i, (i + 1) % num_replicas) for i in range(num_replicas)]
                total = value
                for _ in range(num_replicas - 1):
                    value = jax.lax.ppermute(value, axis_name, ring)
                    total = total + value
                return total
    """

    def all_reduce(self, value: jax.Array, axis_name: str, num_replicas: int) -> Any:
        """Returns the sum of an array over replicas, on every replica.

        It runs in every replica, while a step is compiled. The result must be equal
        on all of them, which is not proved: `check_replicas_every` of a trainer
        compares what the step leaves. The ring above adds in another order on each
        replica, so that sums of floats differ there by rounding.

        Args:
            value: This replica's value.
            axis_name: What the functions of `jax.lax` call the axis of replicas.
            num_replicas: At least 2.
        """
        raise NotImplementedError

    def check(self, num_replicas: int) -> None:
        """Raises if so many replicas cannot be summed over.

        Raises:
            ValueError: If so.
        """

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


class NcclAllReduce(CrossDeviceOps):
    """XLA's own all-reduce, which is NCCL on NVIDIA GPUs: what there is by default."""

    def all_reduce(self, value: jax.Array, axis_name: str, num_replicas: int) -> Any:
        """Returns the sum, in one all-reduce."""
        del num_replicas
        return jax.lax.psum(value, axis_name)


class HierarchicalCopyAllReduce(CrossDeviceOps):
    """Sums inside groups of neighbours first, then over groups.

    For devices that reach their neighbours faster than others. Each replica of a group
    sums a part of the value over its group (a reduce-scatter), these parts are summed
    over groups (an all-gather and a sum), and an all-gather inside groups puts them
    together. Between groups, only a part of the value travels.

    Args:
        group_size: Replicas of a group, a divisor of the number of replicas. By default
            the largest one below that number: two halves of an even number.

    Raises:
        ValueError: If `group_size` is not a positive integer.
    """

    def __init__(self, group_size: int | None = None) -> None:
        if group_size is not None and not is_positive_int(group_size):
            raise _group_error(group_size, "a positive integer")
        self._group_size = group_size

    def check(self, num_replicas: int) -> None:
        """Raises if replicas cannot be divided into such groups.

        Raises:
            ValueError: If so.
        """
        if self._group_size is not None and num_replicas % self._group_size:
            rule = f"a divisor of the number of replicas, which is {num_replicas}"
            raise _group_error(self._group_size, rule)

    def all_reduce(self, value: jax.Array, axis_name: str, num_replicas: int) -> Any:
        """Returns the sum, made inside groups, over groups, and inside groups again."""
        size = self._group_size
        if size is None or num_replicas % size:  # fewer replicas share an uneven batch
            size = max(n for n in range(1, num_replicas) if num_replicas % n == 0)
        starts = range(0, num_replicas, size)
        inside = [list(range(start, start + size)) for start in starts]
        over = [[start + i for start in starts] for i in range(size)]
        flat = jnp.ravel(value)
        flat = jnp.pad(flat, (0, -flat.size % size))
        part = jax.lax.psum_scatter(
            flat, axis_name, axis_index_groups=inside, tiled=True
        )
        # Not `psum`, which takes no groups inside `shard_map`.
        parts = jax.lax.all_gather(part, axis_name, axis_index_groups=over)
        total = jax.lax.all_gather(
            jnp.sum(parts, 0), axis_name, axis_index_groups=inside, tiled=True
        )
        return total[: value.size].reshape(value.shape)


class ReductionToOneDevice(CrossDeviceOps):
    """Sums on the first replica, which then sends the sum to all others.

    Every value goes over the links of one device: for small values and few devices,
    and for comparison.
    """

    def all_reduce(self, value: jax.Array, axis_name: str, num_replicas: int) -> Any:
        """Returns the sum, by sending values to the first replica and back."""
        total = value
        for other in range(1, num_replicas):
            total = total + jax.lax.ppermute(value, axis_name, [(other, 0)])
        is_first = jax.lax.axis_index(axis_name) == 0
        result = total = jnp.where(is_first, total, jnp.zeros_like(total))
        # Who gets nothing has zeros, so that the parts of the sum add up to it.
        for other in range(1, num_replicas):
            result = result + jax.lax.ppermute(total, axis_name, [(0, other)])
        return result


def _group_error(size: Any, rule: str) -> ValueError:
    return ValueError(
        f"`group_size` is {size!r}, but it must be {rule}. Leave it out for the "
        "largest groups that there are."
    )


def sum_by(ops: CrossDeviceOps, value: jax.Array, num_replicas: int, op: str) -> Any:
    """Returns the sum over replicas that `ops` makes; `op` is what it is for."""

    @jax.custom_jvp
    def total(value: jax.Array) -> jax.Array:
        parts = mark(value, BY_OPS % op)
        result = ops.all_reduce(parts, AXIS_NAME, num_replicas)
        found = (jnp.shape(result), jnp.result_type(result))
        if found != (value.shape, value.dtype):
            raise ValueError(
                f"`all_reduce` of {ops!r} made {found[1]}{list(found[0])} of "
                f"{value.dtype}{list(value.shape)}. Return a sum of the same shape "
                "and dtype as the parts."
            )
        return mark(result, MADE_BY_OPS)

    @total.defjvp
    def derivative(values: Any, tangents: Any) -> Any:
        # Within a loss, as for statistics of a batch, its transpose is needed.
        return total(*values), jax.lax.psum(tangents[0], AXIS_NAME)

    return total(value)


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
            default that of the strategy (`reduce_dtype`), or else their own. The result
            has their own.

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
