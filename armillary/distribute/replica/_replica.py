"""The replica in which the code runs, and its collectives."""

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.dtypes import float0

from armillary._checks import check_callable
from armillary.data._layout import Active, are_first
from armillary.distribute.replica._arithmetic import (
    check_wire_dtype,
    narrow,
    neutral,
    reduce_alone,
    reduce_along,
    to_wire,
    widen,
)
from armillary.distribute.replica._context import (
    Scope,
    lifted_state,
    refuse_part_of_replica,
)
from armillary.distribute.replica._own_ops import reduce_by
from armillary.distribute.replica._values import (
    PerReplica,
    ReduceOp,
    concatenate,
    is_argument,
    is_per_replica,
)
from armillary.errors import ReplicaContextError
from armillary.state._adapters import is_tree_variable
from armillary.state._holders import is_claimed
from armillary.typing import PyTree

if TYPE_CHECKING:
    from armillary.distribute._strategy import Strategy

_EXTREMES = {ReduceOp.MAX: jax.lax.pmax, ReduceOp.MIN: jax.lax.pmin}


class ReplicaContext:
    """The replica in which the code runs (`tf.distribute.ReplicaContext`).

    Attributes:
        strategy: The strategy whose `run` made this replica.
        axis_name: The name of the axis of replicas in `jax.lax`; `None` if there is
            only one replica.
        active: The numbers of the replicas that hold data in this step.
        was_asked: Whether the step has used the number of replicas in any way.
        share_size: Examples of each replica's share of the batch; `None` if `run` got
            no batch, or arrays of different lengths.
    """

    def __init__(
        self,
        strategy: "Strategy",
        axis_name: str | None,
        active: Active,
        num_replicas: int | None = None,
        share_size: int | None = None,
    ) -> None:
        self.strategy = strategy
        self.axis_name = axis_name
        self.active = active
        self.was_asked = False
        self.share_size = share_size
        self._num_replicas = num_replicas or strategy.num_replicas_in_sync

    @property
    def num_replicas_in_sync(self) -> int:
        """Replicas that run this step together.

        It is less than the strategy's number only for an uneven batch of a dataset
        with `InputOptions(remainder="exact")`.
        """
        self.was_asked = True
        return self._num_replicas

    @property
    def num_active(self) -> int:
        """Replicas that hold data; fewer only at the end of a complete evaluation."""
        self.was_asked = True
        return len(self.active)

    @property
    def replica_id_in_sync_group(self) -> Any:
        """The number of this replica, from 0; traced if there are several replicas."""
        return 0 if self.axis_name is None else jax.lax.axis_index(self.axis_name)

    def all_reduce(
        self, reduce_op: ReduceOp | str, value: PyTree, *, dtype: Any = None
    ) -> PyTree:
        """Combines a value over replicas; every replica gets the result.

        See `armillary.all_reduce`, which is the same.

        Raises:
            ReplicaContextError: If `value` is a `PerReplica`, as `run` returns it.
            ValueError: If `dtype` is not a dtype of floats.
        """
        op = ReduceOp.of(reduce_op)
        wire_dtype = check_wire_dtype(dtype)
        parts = jax.tree.leaves(value, is_leaf=is_per_replica)
        if any(map(is_per_replica, parts)):
            raise ReplicaContextError(
                "`all_reduce` was given a `PerReplica`, as `strategy.run` returns it. "
                "Call it in the function given to `run`, or use `strategy.reduce(op, "
                "value)` outside."
            )
        refuse_part_of_replica("all_reduce", self.strategy)
        if self.axis_name is None or self._num_replicas == 1:
            return jax.tree.map(functools.partial(reduce_alone, op), value)
        self._check_is_not_hidden("all_reduce", self.axis_name)

        leaves, treedef = jax.tree.flatten(value)
        # Leaves of dtype `float0` are gradients of integers, and hold no numbers.
        places = [i for i, x in enumerate(leaves) if jnp.result_type(x) != float0]
        given = [jnp.asarray(leaves[i]) for i in places]
        wide = [self._counted(op, widen(op, array)) for array in given]
        sent = [to_wire(array, wire_dtype) for array in wide]

        # In one round, because XLA can join the arrays of one operation.
        received = self._reduce(op, sent)
        for i, old, whole, result in zip(places, given, wide, received, strict=True):
            result = result.astype(whole.dtype)
            if op is ReduceOp.MEAN:
                result /= len(self.active)
            leaves[i] = narrow(op, result, old.dtype)
        return treedef.unflatten(leaves)

    def _reduce(self, op: ReduceOp, values: list[jax.Array]) -> list[Any]:
        """Returns arrays combined over replicas, in the way of the strategy."""
        ops = self.strategy.cross_device_ops
        if ops is not None and values:
            axis = self.strategy.axis_name
            return reduce_by(ops, op, values, axis, self._num_replicas)
        reduce = _EXTREMES.get(op, jax.lax.psum)
        return reduce(values, self.axis_name)

    def _check_is_not_hidden(self, function: str, axis_name: str) -> None:
        """Raises if another axis of the same name hides the axis of replicas."""
        size = jax.lax.axis_size(axis_name)
        if size == self._num_replicas:
            return
        raise ReplicaContextError(
            f"`{function}` was called where {axis_name!r} is an axis of size {size}, "
            f'as inside `jax.vmap(fn, axis_name="{axis_name}")`, and not the axis of '
            f"{self._num_replicas} replicas. Call it outside of `fn`, or give the axis "
            "of replicas another name (`axis_name=...` of the strategy)."
        )

    def _counted(self, op: ReduceOp, value: jax.Array) -> jax.Array:
        """Returns a value, replaced by a neutral value where a replica has no data."""
        if len(self.active) == self._num_replicas:
            return value
        return jnp.where(self.is_active(), value, neutral(op, value))

    def all_gather(self, value: PyTree, axis: int) -> PyTree:
        """Joins the values of all replicas along an axis, on every replica.

        Args:
            value: A pytree of arrays of equal shape on all replicas.
            axis: The axis to join, such as 0 for examples.

        Returns:
            The same pytree, with `axis` longer by the number of replicas with data.

        Raises:
            ValueError: If a value has no such axis.
        """
        refuse_part_of_replica("all_gather", self.strategy)
        if self.axis_name is None:
            return value
        self._check_is_not_hidden("all_gather", self.axis_name)

        def gather(leaf: Any) -> jax.Array:
            rows = jax.lax.all_gather(leaf, self.axis_name)
            return concatenate(PerReplica(rows, self.active), axis)

        return jax.tree.map(gather, value)

    def merge_call(
        self,
        merge_fn: Callable[..., PyTree],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> PyTree:
        """Calls `merge_fn(strategy, *args, **kwargs)` in cross-replica context.

        As in `tf.distribute`: a step leaves its replica for a function that sees the
        values of all replicas, and continues with the result::

            def apply(strategy, gradients):
                gradients = strategy.reduce("mean", gradients)
                optimizer.update(model, gradients)

            armillary.get_replica_context().merge_call(apply, args=(gradients,))

        In `merge_fn`, arrays of the arguments are `PerReplica` values, for
        `strategy.reduce`, `gather`, `local_results` and `run`. Modules, variables and
        everything else are passed unchanged. With one replica, arrays stay arrays.

        Args:
            merge_fn: The function. It gets the strategy first.
            args: Positional arguments, pytrees.
            kwargs: Keyword arguments, pytrees.

        Returns:
            The result of `merge_fn`. Each replica gets its part of a `PerReplica`.

        Raises:
            TypeError: If `merge_fn` cannot be called.
        """
        check_callable("merge_fn", merge_fn)
        shared_args, shared_kwargs = self._share((tuple(args), kwargs or {}))
        with Scope(self.strategy):
            result = merge_fn(self.strategy, *shared_args, **shared_kwargs)
        return self._take_own(result)

    def run_merged(
        self, fn: Callable[..., PyTree], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> PyTree:
        """Calls `fn` in this replica again: `strategy.run` within `merge_call`."""
        own_args, own_kwargs = self._take_own((args, kwargs))
        with Scope(self.strategy, self):
            result = fn(*own_args, **own_kwargs)
            return self._share(result)

    def reduce_merged(
        self, op: ReduceOp, value: PerReplica, axis: int | None
    ) -> jax.Array:
        """Reduces a value over replicas: `strategy.reduce` within `merge_call`."""
        return self.all_reduce(op, reduce_along(op, value.own, axis))

    def _share(self, tree: PyTree) -> PyTree:
        """Returns a pytree with a `PerReplica` for each array."""
        if self.axis_name is None:
            return tree
        state = lifted_state()
        lifted = set() if state is None else {slot.key for slot in state.slots}

        def is_object(part: Any) -> bool:
            # Objects are not copied, because writes to a copy would be lost. Variables
            # that are not lifted are values, such as gradients in an `nnx.State`.
            is_value = is_tree_variable(part) and id(part) not in lifted
            return is_claimed(part) and not is_value

        def share(leaf: Any) -> Any:
            if not isinstance(leaf, jax.Array):
                return leaf
            rows = jax.lax.all_gather(leaf, self.axis_name)
            shared = PerReplica(rows, self.active)
            shared.own = leaf
            return shared

        return jax.tree.map(share, tree, is_leaf=is_object)

    def _take_own(self, tree: PyTree) -> PyTree:
        """Returns a pytree with this replica's part of each `PerReplica`."""

        def take(leaf: Any) -> Any:
            if not is_per_replica(leaf):
                return leaf
            if leaf.own is not None:
                return leaf.own
            if leaf.is_shared:
                return leaf.array
            return leaf.array[self.replica_id_in_sync_group]

        return jax.tree.map(take, tree, is_leaf=is_argument)

    def is_active(self) -> jax.Array:
        """Returns whether this replica holds data; traced if there are several."""
        replica = self.replica_id_in_sync_group
        if are_first(self.active):
            return replica < len(self.active)
        return jnp.any(replica == np.array(self.active))

    def is_first(self) -> jax.Array:
        """Returns whether this is the first replica that holds data."""
        return self.replica_id_in_sync_group == self.active[0]
