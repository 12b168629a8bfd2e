"""Runs a function as the only replica, with the axis of replicas bound.

The axis has one replica then, so that a step which names it (`jax.lax.pmean(gradients,
"replica")`, batch statistics of all replicas) is the same text under every strategy.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.extend import core

from armillary._jaxpr import (
    call_program,
    is_in_trace,
    named_axes,
    source_line,
    walk_programs,
)
from armillary.distribute.replica._collectives import ReplicaContext, is_argument
from armillary.distribute.replica._context import Scope
from armillary.distribute.replica._run import Call
from armillary.distribute.replica._values import AXIS_NAME
from armillary.errors import ReplicaContextError, StateStructureError
from armillary.state._holders import is_claimed
from armillary.state._lift import State
from armillary.typing import PyTree

if TYPE_CHECKING:
    from armillary.distribute._strategy import Strategy


def run_alone(
    strategy: "Strategy",
    fn: Callable[..., PyTree],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    state: State | None = None,
) -> PyTree:
    """Calls `fn`: as one call of the program of the step that has `state`, or here."""
    context = ReplicaContext(strategy, None, active=1)
    if state is None or not is_in_trace():
        return _run_in_place(context, fn, args, kwargs)
    call = Call(fn, state)
    program = jax.make_jaxpr(
        lambda slots: call.run(context, slots, args, kwargs), axis_env=[(AXIS_NAME, 1)]
    )(call.before)
    if _names_axis(program):
        outputs = jax.vmap(
            lambda _: call_program(program, call.before, call.name), axis_name=AXIS_NAME
        )(jnp.zeros(1))
        outputs = [output[0] for output in outputs]
    else:
        outputs = call_program(program, call.before, call.name)
    _, after, values = call.split(outputs)
    call.write(after)
    return call.returned(values)


def _names_axis(program: core.ClosedJaxpr) -> bool:
    found = [
        equation
        for jaxpr, _ in walk_programs(program)
        for equation in jaxpr.eqns
        if AXIS_NAME in named_axes(equation)
    ]
    for equation in found:
        name = equation.primitive.name
        if name.endswith("all_to_all"):  # Its result has another shape here.
            raise ReplicaContextError(
                f"`{name}` at {source_line(equation)} exchanges parts of one "
                "replica, which JAX cannot do. Leave it out where "
                "`strategy.num_replicas_in_sync` is 1."
            )
    return bool(found)


def _run_in_place(
    context: ReplicaContext,
    fn: Callable[..., PyTree],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> PyTree:
    """Calls `fn` where it stands: its values stay what they are, concrete or not."""
    leaves = jax.tree.leaves((args, kwargs), is_leaf=is_argument)
    roots = [(root, "") for root in (fn, *filter(is_claimed, leaves))]
    state = State(roots)
    result: list[Any] = []

    def run(_: Any) -> list[Any]:
        move()
        with Scope(context.strategy, context):
            result[:] = jax.tree.flatten(fn(*args, **kwargs), is_leaf=is_claimed)
        held = [leaf for slot in state.slots for leaf in _read_slot(slot)]
        # Only what asks for the number of the replica has the axis, of length 1.
        return list(filter(_has_axis, [*result[0], *held]))

    with state.moved() as move:
        outputs = iter(jax.vmap(run, axis_name=AXIS_NAME)(jnp.zeros(1)))

    def without_axis(leaf: Any) -> Any:
        return next(outputs)[0] if _has_axis(leaf) else leaf

    values = list(map(without_axis, result[0]))
    for slot in state.slots:
        held = _read_slot(slot)
        if any(map(_has_axis, held)):
            slot.write(list(map(without_axis, held)))
    if any(map(is_claimed, values)):  # that may have been made here
        State([*roots, (values, "")]).move_new(state)
    return result[1].unflatten(values)


def _read_slot(slot: Any) -> list[Any]:
    # Where no step goes on with it, it may have become something else.
    try:
        return slot.read()
    except StateStructureError:
        return []


def _has_axis(leaf: Any) -> bool:
    return isinstance(leaf, Tracer) and hasattr(leaf, "batch_dim")
