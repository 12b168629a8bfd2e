"""Aggregates what replicas write to a variable, at the write.

A variable with `synchronization=ON_WRITE` and an aggregation is equal on all replicas
at every read, as in `tf.distribute`. While a replica runs, a hook of NNX on such a
variable brings the written values together. NNX copies the hook with the variable, so
that writes inside its transformations are aggregated too.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax

from armillary.distribute.replica._collectives import ReplicaContext
from armillary.distribute.replica._policy import Policy, combine, written_policy_of
from armillary.state._lift import State
from armillary.state._nnx import NnxSlot

_HOOKS = ("on_get_value", "on_set_value")


@contextlib.contextmanager
def aggregated_writes(state: State, context: ReplicaContext) -> Iterator[None]:
    """Aggregates writes to the variables of `state` that ask for it."""
    undo: list[Callable[[], None]] = []
    try:
        for slot in state.slots:
            policy = written_policy_of(slot)
            if policy is not None and isinstance(slot, NnxSlot):
                undo.append(_hook(slot, policy, context))
        yield
    finally:
        for restore in undo:
            restore()


def _hook(slot: NnxSlot, policy: Policy, context: ReplicaContext) -> Callable[[], None]:
    variable = slot.variable
    old = {name: variable.get_metadata(name, None) for name in _HOOKS}
    reads: list[None] = []

    def note_read(_: Any, value: Any) -> Any:
        reads.append(None)
        return value

    def aggregate(_: Any, value: Any) -> Any:
        if policy is Policy.SUM and reads:
            raise ValueError(
                f"`synchronization` of {slot.path} is ON_WRITE and its `aggregation` "
                "is SUM, so that a write sums what the replicas assign, but this step "
                "has read it before: `variable[...] += x` would count the old value "
                "once for each replica. Leave `synchronization` out, so that each "
                "replica's addition counts, or write before you read."
            )
        return jax.tree.map(lambda leaf: combine(policy, leaf, context), value)

    for name, hook in zip(_HOOKS, (note_read, aggregate), strict=True):
        variable.set_metadata(name, _chain(*_as_tuple(old[name]), hook))

    def restore() -> None:
        for name, hooks in old.items():
            if hooks is None:
                variable.del_metadata(name)
            else:
                variable.set_metadata(name, hooks)

    return restore


def _chain(*hooks: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Returns one hook that calls several: Flax before 0.12.7 takes no tuple."""
    return lambda variable, value: functools.reduce(
        lambda result, hook: hook(variable, result), hooks, value
    )


def _as_tuple(hooks: Any) -> tuple[Any, ...]:
    if hooks is None:
        return ()
    return hooks if isinstance(hooks, tuple) else (hooks,)
