"""Combines the values that replicas write to a variable, at each write.

A variable with `synchronization=ON_WRITE` and an aggregation is equal on all replicas
at every read, as in `tf.distribute`. While a replica's function is traced, such a
variable has a hook of NNX that combines the written values. NNX copies the hook with
the variable, so writes inside its transformations are combined too.
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
from armillary.state._nnx import NnxSlot

_READ = "on_get_value"
_WRITE = "on_set_value"


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
            if policy is not None and isinstance(slot, NnxSlot):
                undo.append(_hook(slot, policy, context))
        yield
    finally:
        for restore in undo:
            restore()


def _hook(slot: NnxSlot, policy: Policy, context: ReplicaContext) -> Callable[[], None]:
    """Adds the hooks to a variable; returns a function that removes them."""
    variable = slot.variable
    before = {name: variable.get_metadata(name, None) for name in (_READ, _WRITE)}
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

    for name, hook in ((_READ, note_read), (_WRITE, combine_written)):
        variable.set_metadata(name, _chain((*_as_tuple(before[name]), hook)))

    def restore() -> None:
        for name, hooks in before.items():
            if hooks is None:
                variable.del_metadata(name)
            else:
                variable.set_metadata(name, hooks)

    return restore


def _chain(hooks: tuple[Callable[[Any, Any], Any], ...]) -> Callable[[Any, Any], Any]:
    """Joins several hooks into one, because older releases of Flax take only one."""

    def call(variable: Any, value: Any) -> Any:
        for hook in hooks:
            value = hook(variable, value)
        return value

    return call


def _as_tuple(hooks: Any) -> tuple[Any, ...]:
    if hooks is None:
        return ()
    return hooks if isinstance(hooks, tuple) else (hooks,)
