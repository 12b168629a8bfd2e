"""Checks of the arguments of `Strategy.run`."""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import jax

from armillary.distribute.replica._values import is_per_replica
from armillary.errors import ReplicaContextError
from armillary.typing import PyTree


def check_divided(strategy: object, arguments: PyTree) -> None:
    """Raises if `run` gets a whole batch in a step that runs under no strategy."""
    leaves = jax.tree.leaves(arguments, is_leaf=is_per_replica)
    has_arrays = any(isinstance(leaf, jax.Array) for leaf in leaves)
    if has_arrays and not any(map(is_per_replica, leaves)):
        raise ReplicaContextError(
            f"`run` of {strategy!r} was called in a step that runs under no strategy, "
            "so each replica would get the whole batch. Assign the strategy to an "
            "attribute of the trainer (`self.strategy = strategy`), or use "
            "`strategy.scope()`."
        )


def check_is_no_batch(
    fn: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]
) -> None:
    """Raises if `args` is a batch that is a tuple, instead of a tuple with the batch.

    It is called only after an error, because reading a signature takes long.
    """
    if len(args) > 1 and _fits(fn, [args], kwargs) and not _fits(fn, args, kwargs):
        name = getattr(fn, "__name__", "fn")
        raise TypeError(
            f"`args` is a tuple of {len(args)} values, so `{name}` gets "
            f"{len(args)} arguments, but it takes one. To give it a batch that is a "
            "tuple, write `strategy.run(fn, args=(batch,))`, with the comma."
        ) from None


def _fits(fn: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    try:
        inspect.signature(fn).bind(*args, **kwargs)
    except (TypeError, ValueError):  # A `ValueError` if `fn` has no signature.
        return False
    return True
