"""Runs a function on a single replica, without `jax.shard_map`.

The axis of replicas exists here, too, with length 1. So a step that names the axis is
the same code under every strategy.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.extend import core
from jax.sharding import SingleDeviceSharding

from armillary._jax_compat import get_mapped_axes
from armillary._jaxpr import (
    call_program,
    is_in_trace,
    named_axes,
    programs_in,
    source_line,
)
from armillary.distribute.replica._call import Call
from armillary.distribute.replica._context import Scope
from armillary.distribute.replica._replica import ReplicaContext
from armillary.distribute.replica._values import is_argument
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
    edit: Callable[[core.ClosedJaxpr], core.ClosedJaxpr] | None = None,
) -> PyTree:
    """Calls `fn` on a single replica.

    In a trace with `state`, its program becomes one operation. Otherwise, it runs in
    place. `edit` may add to the program, whose inputs are the arrays of the state.
    """
    context = ReplicaContext(strategy, None, active=(0,))
    if state is None or not is_in_trace():
        return _run_in_place(context, fn, args, kwargs)
    call = Call(fn, state)
    axis = strategy.axis_name

    def run(slots: list[Any]) -> tuple[list[Any], list[Any]]:
        # Without the arrays before the call, XLA compiles the program faster.
        _, after, values = call.run(context, slots, args, kwargs)
        return after, values

    program = jax.make_jaxpr(run, axis_env=[(axis, 1)])(call.before)
    if edit is not None:
        program = edit(program)

    def evaluate(*_: Any) -> list[Any]:
        return call_program(program, call.before, call.name)

    if _names_axis(program, axis):
        rows = jax.vmap(evaluate, axis_name=axis)(jnp.zeros(1))
        outputs = [row[0] for row in rows]
    else:
        # Without the axis, the program is cheaper, and any operation may be in it.
        outputs = evaluate()

    num_changed = len(call.changed)
    call.write(outputs[:num_changed])
    return call.returned(outputs[num_changed:])


def _names_axis(program: core.ClosedJaxpr, axis: str) -> bool:
    """Returns whether a program needs the axis of replicas.

    Raises:
        ReplicaContextError: If the axis cannot exist, or its name has a second meaning.
    """
    named: list[Any] = []
    hiding: list[Any] = []
    pending: list[Any] = [program]
    while pending:
        current = pending.pop()
        for equation in getattr(current, "jaxpr", current).eqns:
            is_map = equation.primitive.name == "shard_map"
            if is_map and axis in get_mapped_axes(equation):
                # Inside, the name is an axis of the user's mesh.
                hiding.append(equation)
                continue
            if axis in named_axes(equation):
                named.append(equation)
            pending.extend(programs_in(equation))

    if named and hiding:
        raise ReplicaContextError(
            f"`shard_map` at {source_line(hiding[0])} is over an axis {axis!r} of its "
            f"mesh, but the axis of replicas has this name too, and the step uses it "
            f"at {source_line(named[0])}. Give the axis of the mesh another name, or "
            "the axis of replicas (`axis_name=...` of the strategy)."
        )
    for equation in named:
        name = equation.primitive.name
        if name.endswith("all_to_all"):  # Its result would have a different shape.
            raise ReplicaContextError(
                f"`{name}` at {source_line(equation)} exchanges parts of one "
                "replica, which JAX cannot do. Leave it out where "
                "`strategy.num_replicas_in_sync` is 1."
            )
    return bool(named)


def _bring_to(device: Any, state: State) -> None:
    """Moves arrays that are on other devices, such as on a mesh of the program."""
    leaves = state.read()
    here = SingleDeviceSharding(device)
    elsewhere: set[int] = set()
    for i, leaf in enumerate(leaves):
        is_placed = isinstance(leaf, jax.Array) and not isinstance(leaf, Tracer)
        if is_placed and leaf.committed and leaf.devices() != {device}:
            elsewhere.add(i)
            leaves[i] = jax.device_put(leaf, here)
    if elsewhere:
        state.write(leaves, elsewhere)


def _run_in_place(
    context: ReplicaContext,
    fn: Callable[..., PyTree],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> PyTree:
    """Calls `fn` without a trace of its own, so values stay concrete or traced."""
    leaves = jax.tree.leaves((args, kwargs), is_leaf=is_argument)
    objects = [leaf for leaf in leaves if is_claimed(leaf)]
    roots = [(root, "") for root in (fn, *objects)]
    state = State(roots)
    device = context.strategy.default_device
    if device is not None:
        _bring_to(device, state)

    results: list[Any] = []
    treedef: Any = None

    def run(_: Any) -> list[Any]:
        nonlocal treedef
        move()
        with Scope(context.strategy, context):
            result = fn(*args, **kwargs)
            results[:], treedef = jax.tree.flatten(result, is_leaf=is_claimed)
        held = list(results)
        for slot in state.slots:
            held += _read_slot(slot)
        # Only values that depend on the number of the replica have the mapped axis.
        return [leaf for leaf in held if _has_axis(leaf)]

    with state.moved() as move:
        axis = context.strategy.axis_name
        # The operand only gives the axis its length of 1.
        outputs = iter(jax.vmap(run, axis_name=axis)(jnp.zeros(1)))

    def without_axis(leaf: Any) -> Any:
        if not _has_axis(leaf):
            return leaf
        row = next(outputs)
        return row[0]

    # ORDER: as in `run`, because `outputs` are taken one after the other.
    values = [without_axis(leaf) for leaf in results]
    for slot in state.slots:
        held = _read_slot(slot)
        if any(map(_has_axis, held)):
            slot.write([without_axis(leaf) for leaf in held])

    may_have_new_objects = any(map(is_claimed, values))
    if may_have_new_objects:
        State([*roots, (values, "")]).move_new(state)
    return treedef.unflatten(values)


def _read_slot(slot: Any) -> list[Any]:
    """Returns the arrays of a slot; none if it has a new structure.

    Outside a step, a function may change the structure of a slot.
    """
    try:
        return slot.read()
    except StateStructureError:
        return []


def _has_axis(leaf: Any) -> bool:
    """Returns whether a value has the axis of replicas, by the tracer of `jax.vmap`."""
    return isinstance(leaf, Tracer) and hasattr(leaf, "batch_dim")
