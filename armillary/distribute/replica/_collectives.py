"""What a replica can do with the others, inside `Strategy.run`."""

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.dtypes import float0

from armillary.data._layout import Active
from armillary.distribute.replica._context import Scope, lifted_state
from armillary.distribute.replica._values import (
    PerReplica,
    ReduceOp,
    check_axis,
    count_active,
    is_per_replica,
    join,
)
from armillary.errors import ReplicaContextError
from armillary.state._holders import is_claimed
from armillary.state._nnx import is_variable
from armillary.typing import PyTree

if TYPE_CHECKING:
    from armillary.distribute._strategy import Strategy


class ReplicaContext:
    """The replica in which the code runs (`tf.distribute.ReplicaContext`).

    Args:
        strategy: The strategy whose `run` made this replica.
        axis_name: The mesh axis that counts replicas, or `None` if there is one replica
            and no such axis.
        active: Which replicas hold data in this step: the first so many, or those of
            these numbers.
        num_replicas: Replicas that run this step; by default those of the strategy.

    Attributes:
        strategy: The strategy whose `run` made this replica.
        axis_name: What `jax.lax` calls the axis of replicas; `None` if there is one.
        active: Which replicas hold data in this step.
        was_asked: Whether the step has used the number of replicas in any way.
    """

    def __init__(
        self,
        strategy: "Strategy",
        axis_name: str | None,
        active: Active,
        num_replicas: int | None = None,
    ) -> None:
        self.strategy = strategy
        self.axis_name = axis_name
        self.active = active
        self.was_asked = False
        self._num_replicas = num_replicas or strategy.num_replicas_in_sync

    @property
    def num_replicas_in_sync(self) -> int:
        """Replicas that run this step together.

        Fewer than those of the strategy only for an uneven batch of a dataset with
        `InputOptions(remainder="exact")`.
        """
        self.was_asked = True
        return self._num_replicas

    @property
    def num_active(self) -> int:
        """Replicas that hold data; fewer only at the end of a complete evaluation."""
        self.was_asked = True
        return count_active(self.active)

    @property
    def replica_id_in_sync_group(self) -> Any:
        """The number of this replica, from 0; traced where there are several."""
        return 0 if self.axis_name is None else jax.lax.axis_index(self.axis_name)

    def all_reduce(
        self, reduce_op: ReduceOp | str, value: PyTree, *, dtype: Any = None
    ) -> PyTree:
        """Combines a value over replicas; every replica gets the result.

        See `armillary.all_reduce`, which is the same.

        Raises:
            ReplicaContextError: If `value` is what `run` returned.
        """
        op, wire = ReduceOp.of(reduce_op), check_wire_dtype("dtype", dtype)
        if any(map(is_per_replica, jax.tree.leaves(value, is_leaf=is_per_replica))):
            raise ReplicaContextError(
                "`all_reduce` was given a `PerReplica`, as `strategy.run` returns it. "
                "Call it in the function given to `run`, or use `strategy.reduce(op, "
                "value)` outside."
            )
        if self.axis_name is None or self._num_replicas == 1:
            return value
        leaves, treedef = jax.tree.flatten(value)
        # Of what is not differentiable there is no gradient.
        places = [i for i, x in enumerate(leaves) if jnp.result_type(x) != float0]
        given = [jnp.asarray(leaves[i]) for i in places]
        wide = [self._counted(op, _widened(op, array)) for array in given]
        reduce = _REDUCE.get(op, jax.lax.psum)
        results = reduce([_to_wire(array, wire) for array in wide], self.axis_name)
        for i, old, new, result in zip(places, given, wide, results, strict=True):
            leaves[i] = result.astype(old.dtype if op in _REDUCE else new.dtype)
            if op is ReduceOp.MEAN:
                leaves[i] = leaves[i] / count_active(self.active)
        return treedef.unflatten(leaves)

    def _counted(self, op: ReduceOp, value: jax.Array) -> jax.Array:
        """Returns a value that changes no result, where a replica holds no data."""
        if count_active(self.active) == self._num_replicas:
            return value
        other = 0
        if op in _REDUCE:
            is_float = jnp.issubdtype(value.dtype, jnp.inexact)
            limits = jnp.finfo(value.dtype) if is_float else jnp.iinfo(value.dtype)
            other = limits.min if op is ReduceOp.MAX else limits.max
        return jnp.where(self.is_active(), value, jnp.full_like(value, other))

    def all_gather(self, value: PyTree, axis: int) -> PyTree:
        """Joins the values of all replicas along an axis; every replica gets it.

        Args:
            value: A pytree of arrays of equal shape on all replicas.
            axis: The axis to join, such as 0 for examples.

        Returns:
            The same pytree, with `axis` longer by the number of replicas with data.

        Raises:
            TypeError: If `axis` is no integer.
            ValueError: If a value has no such axis.
        """
        check_axis(axis)
        if self.axis_name is None:
            return value

        def gather(leaf: Any) -> jax.Array:
            rows = jax.lax.all_gather(leaf, self.axis_name)
            return join(PerReplica(rows, self.active), axis)

        return jax.tree.map(gather, value)

    def merge_call(
        self,
        merge_fn: Callable[..., PyTree],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> PyTree:
        """Runs `merge_fn(strategy, *args)` once, in cross-replica context.

        In it the arguments' arrays are `PerReplica` values, for `strategy.reduce`,
        `gather`, `local_results` and `run`. Arrays that it returns reach every replica;
        of a `PerReplica`, each replica gets its part.

        Args:
            merge_fn: The function. It gets the strategy first.
            args: Positional arguments, pytrees.
            kwargs: Keyword arguments, pytrees.

        Returns:
            What `merge_fn` returned.
        """
        given = self._share((args, kwargs or {}))
        with Scope(self.strategy):
            result = merge_fn(self.strategy, *given[0], **given[1])
        return self._own(result)

    def run_merged(self, fn: Callable[..., PyTree], args: Any, kwargs: Any) -> PyTree:
        """Runs `fn` in this replica again, as `strategy.run` does in `merge_call`."""
        args, kwargs = self._own((args, kwargs))
        with Scope(self.strategy, self):
            return self._share(fn(*args, **kwargs))

    def _own(self, tree: PyTree) -> PyTree:
        def own(leaf: Any) -> Any:
            if not is_per_replica(leaf):
                return leaf
            row = self.replica_id_in_sync_group
            return leaf.array if leaf.is_shared else leaf.array[row]

        return jax.tree.map(own, tree, is_leaf=is_argument)

    def _share(self, tree: PyTree) -> PyTree:
        if self.axis_name is None:
            return tree
        state = lifted_state()
        lifted = set() if state is None else {slot.key for slot in state.slots}

        def is_object(part: Any) -> bool:
            # A copy of it would lose what is written. Variables that are not lifted
            # are values, such as those of gradients.
            return is_claimed(part) and (id(part) in lifted or not is_variable(part))

        def share(leaf: Any) -> Any:
            if not isinstance(leaf, jax.Array):
                return leaf
            return PerReplica(jax.lax.all_gather(leaf, self.axis_name), self.active)

        return jax.tree.map(share, tree, is_leaf=is_object)

    def is_active(self) -> jax.Array:
        """Returns whether this replica holds data; traced where there are several."""
        replica = self.replica_id_in_sync_group
        if isinstance(self.active, int):
            return replica < self.active
        return jnp.any(replica == np.array(self.active))

    def is_first(self) -> jax.Array:
        """Returns whether this is the first replica that holds data."""
        first = 0 if isinstance(self.active, int) else self.active[0]
        return self.replica_id_in_sync_group == first


def is_argument(value: Any) -> bool:
    """Returns whether `value` is passed to a replica whole, for use as `is_leaf`."""
    # NNX objects are pytrees too, but a copy of one would lose what `fn` writes.
    return is_per_replica(value) or is_claimed(value)


_REDUCE = {ReduceOp.MAX: jax.lax.pmax, ReduceOp.MIN: jax.lax.pmin}


def check_wire_dtype(name: str, dtype: Any) -> Any:
    with contextlib.suppress(TypeError, ValueError):
        if dtype is None or jnp.issubdtype(jnp.dtype(dtype), jnp.floating):
            return dtype
    raise ValueError(
        f"`{name}` is {dtype!r}, but values travel between replicas in a dtype of "
        "floats. Use `jnp.bfloat16`, or leave it out for the dtype of each value."
    )


def _widened(op: ReduceOp, value: jax.Array) -> jax.Array:
    """Returns a value as a number whose sum does not overflow as soon."""
    is_small = value.dtype == bool or (
        op is ReduceOp.MEAN
        and jnp.issubdtype(value.dtype, jnp.integer)
        and value.dtype.itemsize < 4
    )
    return value.astype(int) if is_small else value


def _to_wire(value: jax.Array, dtype: Any) -> jax.Array:
    is_float = jnp.issubdtype(value.dtype, jnp.floating)
    return value if dtype is None or not is_float else value.astype(dtype)
