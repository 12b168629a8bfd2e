"""What a replica can do with the others, inside `Strategy.run`."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from armillary.data._layout import Active
from armillary.distribute.replica._context import entered, lifted_state
from armillary.distribute.replica._retype import cast, varies
from armillary.distribute.replica._values import (
    PerReplica,
    ReduceOp,
    count_active,
    is_per_replica,
)
from armillary.errors import DoubleReductionError
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
        has_own_data: Whether `run` was given values that differ between replicas.

    Attributes:
        strategy: The strategy whose `run` made this replica.
        active: Which replicas hold data in this step.
        was_asked: Whether the step has used the number of replicas in any way.
    """

    def __init__(
        self,
        strategy: "Strategy",
        axis_name: str | None,
        active: Active,
        num_replicas: int | None = None,
        has_own_data: bool = True,
    ) -> None:
        self.strategy = strategy
        self.active = active
        self.was_asked = False
        self._num_replicas = num_replicas or strategy.num_replicas_in_sync
        self._axis_name = axis_name
        self._has_own_data = has_own_data

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
        return 0 if self._axis_name is None else jax.lax.axis_index(self._axis_name)

    def all_reduce(self, reduce_op: ReduceOp | str, value: PyTree) -> PyTree:
        """Combines a per-replica value over replicas; every replica gets the result.

        Args:
            reduce_op: `ReduceOp.SUM` or `ReduceOp.MEAN`.
            value: A pytree of arrays that differ between replicas.

        Returns:
            The same pytree, with values that are equal on all replicas.

        Raises:
            DoubleReductionError: If there are several replicas and `value` is equal on
                all of them, as a gradient with respect to mirrored parameters is, and
                what is computed from a batch that was not distributed.
            ValueError: If `reduce_op` names no operation.
        """
        op = ReduceOp.of(reduce_op)
        if self._axis_name is None:
            return value
        return jax.tree.map(lambda leaf: self._all_reduce(op, leaf), value)

    def _all_reduce(self, op: ReduceOp, leaf: Any) -> jax.Array:
        if not varies(leaf):
            if self.num_replicas_in_sync == 1:
                return leaf
            raise DoubleReductionError(
                double_reduction_message("all_reduce", "", self._has_own_data)
            )
        if self.num_active < self.num_replicas_in_sync:
            leaf = jnp.where(self.is_active(), leaf, jnp.zeros_like(leaf))
        total = jax.lax.psum(leaf, self._axis_name)
        return total / self.num_active if op is ReduceOp.MEAN else total

    def local(self, value: PyTree) -> PyTree:
        """Returns values as this replica's own, although they are equal on all.

        Gradients with respect to them are this replica's, not summed over replicas: for
        per-example gradients, inner loops of meta-learning and Jacobians of the
        model. Reduce what you make of them, or differentiate through this call::

            params = context.local(params)
            grads = jax.vmap(jax.grad(loss_fn), (None, 0))(params, examples)
            grads = context.all_reduce("sum", jax.tree.map(clip_and_sum, grads))

        Args:
            value: A pytree of arrays, or an NNX module, of which this makes a copy.

        Returns:
            The same pytree.
        """
        if self._axis_name is None:
            return value
        return jax.tree.map(cast, value)

    def all_gather(self, value: PyTree, axis: int) -> PyTree:
        """Joins the values of all replicas along an axis; every replica gets it.

        Args:
            value: A pytree of arrays of equal shape on all replicas.
            axis: The axis to join, such as 0 for examples.

        Returns:
            The same pytree, with `axis` longer by the number of replicas with data.
        """
        if self._axis_name is None:
            return value
        shared = jax.tree.map(self._shared, value)
        with entered(self.strategy, None):
            return self.strategy.gather(shared, axis)

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
        given = (args, kwargs or {})
        if self._axis_name is not None:
            given = tuple(map(self._share_arrays, given))
        with entered(self.strategy, None, merging=self):
            result = merge_fn(self.strategy, *given[0], **given[1])
        return self._own_parts(result)

    def run_merged(
        self, fn: Callable[..., PyTree], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> PyTree:
        """Runs `fn` in this replica again, as `strategy.run` does inside `merge_call`.

        Returns:
            What it returned, each array as a `PerReplica`.
        """
        args, kwargs = self._own_parts((args, kwargs))
        with entered(self.strategy, self):
            return self._share_arrays(fn(*args, **kwargs))

    def _own_parts(self, value: PyTree) -> PyTree:
        def own(leaf: Any) -> Any:
            if not is_per_replica(leaf):
                return leaf
            if leaf.is_shared:
                return leaf.array
            return leaf.array[self.replica_id_in_sync_group]

        return jax.tree.map(own, value, is_leaf=is_argument)

    def _share_arrays(self, value: PyTree) -> PyTree:
        state = lifted_state()
        lifted = set() if state is None else {slot.key for slot in state.slots}

        def is_object(part: Any) -> bool:
            # A copy of a variable or a module would lose what `merge_fn` writes to it.
            # Variables that are not lifted are values, such as those of gradients.
            is_value = is_variable(part) and id(part) not in lifted
            return is_claimed(part) and not is_value

        def share(leaf: Any) -> Any:
            return self._shared(leaf) if isinstance(leaf, jax.Array) else leaf

        return jax.tree.map(share, value, is_leaf=is_object)

    def _shared(self, leaf: Any) -> Any:
        if self._axis_name is None:
            return leaf
        shared_by = None if varies(leaf) else self.num_replicas_in_sync
        if shared_by is None:
            leaf = jax.lax.all_gather(leaf, self._axis_name, to="invarying")
        return PerReplica(leaf, self.active, shared_by, self._has_own_data)

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


def double_reduction_message(
    function: str, where: str, has_own_data: bool = True
) -> str:
    """Returns the message for reducing what all replicas share.

    Args:
        function: What reduces it.
        where: Where in the user's program, beginning with a comma, if that is known.
        has_own_data: Whether `run` was given values that differ between replicas.
    """
    start = f"`{function}` was given a value that is equal on all replicas{where}. "
    if not has_own_data:
        return start + (
            "No argument of `strategy.run` is a batch of a distributed dataset, so "
            "every replica computed the same from the same arrays. Pass batches of "
            "`strategy.distribute_dataset(...)`, of which each replica gets its share; "
            "if the same is meant, use the value as it is."
        )
    return start + (
        "Inside `strategy.run`, gradients with respect to mirrored parameters arrive "
        "already summed over replicas, so reducing them again makes them too large by "
        "the number of replicas. Use the value as it is, after scaling the loss with "
        "`armillary.compute_average_loss` or by `1 / strategy.num_replicas_in_sync`; "
        "to count replicas, use `strategy.num_replicas_in_sync`."
    )
