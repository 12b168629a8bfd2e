"""Combines the values that replicas write to a variable, at each write.

A variable with `synchronization=ON_WRITE` and an aggregation is equal on all replicas
at every read, as in `tf.distribute`. While a replica's function is traced, such a
variable has a hook that combines the written values. NNX copies the hook with the
variable, so writes inside its transformations are combined too. Keras has no hooks.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from armillary.distribute.replica._policy import Policy, combine, written_policy_of
from armillary.distribute.replica._replica import ReplicaContext
from armillary.state._lift import State
from armillary.state._slots import Slot


@contextlib.contextmanager
def combined_writes(state: State, context: ReplicaContext) -> Iterator[None]:
    """Combines writes to the variables with `synchronization=ON_WRITE`.

    Raises:
        ValueError: When a sum is written to a variable that the step has read.
    """
    undo: list[Callable[[], None]] = []
    try:
        for slot in state.slots if context.axis_name is not None else ():
            policy = written_policy_of(slot)
            if policy is not None:
                undo.append(_hook(slot, policy, context))
        yield
    finally:
        for restore in undo:
            restore()


def _hook(slot: Slot, policy: Policy, context: ReplicaContext) -> Callable[[], None]:
    """Adds the hooks to a variable; returns a function that removes them."""
    was_read = False

    def note_read(_: Any, value: Any) -> Any:
        nonlocal was_read
        was_read = True
        return value

    def combine_written(_: Any, value: Any) -> Any:
        if policy is Policy.SUM and was_read:
            raise ValueError(
                f"`synchronization` of {slot.path} is ON_WRITE and its `aggregation` "
                "is SUM, so a write sums the values that the replicas assign. This "
                "step has read the variable before, and `variable[...] += x` would "
                "count the old value once for each replica. Leave `synchronization` "
                "out, and the additions of all replicas are summed when `run` ends. Or "
                "write before you read."
            )
        whole = functools.partial(combine, policy, context=context)
        return jax.tree.map(lambda leaf: whole(jnp.asarray(leaf)), value)

    return slot.hook(note_read, combine_written)
