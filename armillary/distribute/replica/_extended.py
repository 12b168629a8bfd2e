"""`strategy.extended`, the methods that TensorFlow libraries use to update variables.

A new step does not need them. They exist for code that was written for
`tf.distribute.StrategyExtended`, such as the function of a `merge_call`.
"""

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from armillary._checks import check_callable
from armillary.distribute.replica._context import (
    get_running_context,
    require_cross_replica_context,
)
from armillary.distribute.replica._values import ReduceOp
from armillary.typing import PyTree

if TYPE_CHECKING:
    from armillary.distribute._strategy import Strategy


class StrategyExtended:
    """More methods of a strategy (`tf.distribute.StrategyExtended`).

    `Strategy.extended` returns it. For example, a step may leave its replica for the
    update::

        def apply(strategy, gradient):
            gradient = strategy.extended.reduce_to("mean", gradient, weight)
            strategy.extended.update(weight, assign, args=(gradient,))

        armillary.get_replica_context().merge_call(apply, args=(gradient,))
    """

    def __init__(self, strategy: "Strategy") -> None:
        self._strategy = strategy

    def update(
        self,
        var: Any,
        fn: Callable[..., PyTree],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> PyTree:
        """Calls `fn(var, *args, **kwargs)` for the copy of `var` on each replica.

        Args:
            var: A variable.
            fn: The function that assigns to `var`. In a `merge_call`, it is called on
                each replica, with the replica's part of each `PerReplica`.
            args: Positional arguments after `var`.
            kwargs: Keyword arguments.

        Returns:
            The result of `fn`.

        Raises:
            ReplicaContextError: In replica context.
            TypeError: If `fn` cannot be called.
        """
        check_callable("fn", fn)
        require_cross_replica_context(
            "strategy.extended.update", "call `fn(var)` there", self._strategy
        )
        replica = get_running_context(self._strategy)
        if replica is not None:
            return replica.run_merged(fn, (var, *args), kwargs or {})
        return fn(var, *args, **(kwargs or {}))

    def reduce_to(
        self, reduce_op: ReduceOp | str, value: PyTree, destinations: Any
    ) -> PyTree:
        """Returns `strategy.reduce(reduce_op, value)`, which is on all replicas.

        Args:
            reduce_op: A `ReduceOp`, or its name.
            value: A pytree of `PerReplica` values.
            destinations: The variable that gets the result. It is not used, because the
                result is on all replicas.
        """
        del destinations
        return self._strategy.reduce(reduce_op, value)

    def batch_reduce_to(
        self,
        reduce_op: ReduceOp | str,
        value_destination_pairs: Iterable[tuple[PyTree, Any]],
    ) -> list[PyTree]:
        """Returns `reduce_to` of each pair.

        Args:
            reduce_op: A `ReduceOp`, or its name.
            value_destination_pairs: Pairs of `value` and `destinations`.
        """
        values = [value for value, _ in value_destination_pairs]
        return self._strategy.reduce(reduce_op, values)

    def call_for_each_replica(
        self,
        fn: Callable[..., PyTree],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> PyTree:
        """Returns `strategy.run(fn, args, kwargs)`.

        Args:
            fn: The function, which runs in replica context.
            args: Positional arguments.
            kwargs: Keyword arguments.
        """
        return self._strategy.run(fn, args, kwargs)
