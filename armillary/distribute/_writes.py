"""Aggregates what replicas write to a variable, at the write.

A variable with `synchronization=ON_WRITE` and an aggregation is equal on all replicas
at every read, as in `tf.distribute`. While a replica runs, a hook of NNX on such a
variable brings the written values together. NNX copies the hook with the variable, so
that writes inside its transformations are aggregated too.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import jax

from armillary.distribute._collectives import ReplicaContext
from armillary.distribute._variables import Policy, combine, written_policy_of
from armillary.state import Slot, State

_HOOKS = ("on_get_value", "on_set_value")


@contextlib.contextmanager
def aggregated_writes(state: State, context: ReplicaContext) -> Iterator[None]:
    """Aggregates writes to the variables of `state` that ask for it.

    Args:
        state: The slots, lifted into the trace of the replica.
        context: The replica.

    Raises:
        ValueError: When a sum is written to a variable that the step has read.
    """
    undo: list[Callable[[], None]] = []
    try:
        for slot in state.slots:
            policy = written_policy_of(slot)
            if policy is not None:
                undo.append(_hook(slot, policy, context))
        yield
    finally:
        for restore in undo:
            restore()


def _hook(slot: Slot, policy: Policy, context: ReplicaContext) -> Callable[[], None]:
    variable = getattr(slot, "variable")  # noqa: B009
    old = variable.get_metadata()
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

    before, after = (_as_tuple(old.get(name, ())) for name in _HOOKS)
    variable.set_metadata(
        on_get_value=(*before, note_read), on_set_value=(*after, aggregate)
    )
    return lambda: variable.set_metadata(old)


def _as_tuple(hooks: Any) -> tuple[Any, ...]:
    return hooks if isinstance(hooks, tuple) else (hooks,)
