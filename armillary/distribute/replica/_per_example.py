"""Refuses gradients of single examples that would be summed over replicas.

`jax.vmap(jax.grad(loss_fn), (None, 0))(params, examples)` makes one gradient for each
example. On several replicas the gradient with respect to mirrored parameters arrives
summed, so that the first examples of all replicas would be added up, then the second
ones: numbers that mean nothing. It shows where a parameter that is differentiated, but
not mapped over, meets an example.
"""

from collections.abc import Sequence
from typing import Any

from armillary.distribute.replica._retype import varies
from armillary.errors import DoubleReductionError


def check_not_per_example(operands: Sequence[Any]) -> None:
    """Raises if an operation begins such a gradient.

    Args:
        operands: Its operands, of which at least one varies over replicas.

    Raises:
        DoubleReductionError: If another one is a parameter of such a gradient.
    """
    for operand in operands:
        if _is_per_example(operand) and not varies(operand):
            raise DoubleReductionError(
                "`jax.vmap` of a gradient with respect to mirrored parameters would "
                "sum the gradients of single examples over replicas, the first of each "
                "replica, the second of each, and so on. Differentiate with respect to "
                "the replica's own parameters: `params = armillary."
                "get_replica_context().local(params)`, and reduce what you make of the "
                "gradients: `get_replica_context().all_reduce(ReduceOp.SUM, total)`."
            )


def _is_per_example(operand: Any) -> bool:
    """Returns whether a value is differentiated in a `vmap` that does not map it."""
    trace = getattr(operand, "_trace", None)
    if not getattr(trace, "is_vjp", False):
        return False
    outside = getattr(trace, "parent_trace", None)
    is_mapped = hasattr(getattr(operand, "primal", None), "batch_dim")
    return type(outside).__name__ == "BatchTrace" and not is_mapped
