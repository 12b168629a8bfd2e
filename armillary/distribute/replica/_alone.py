"""Runs a function as the only replica, with the axis of replicas bound.

The axis has one replica then, so that a step which names it (`jax.lax.pmean(gradients,
"replica")`, batch statistics of all replicas) is the same text under every strategy.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.extend import core

from armillary._jaxpr import call_program, named_axes, source_line, walk_programs
from armillary.distribute._global_arrays import is_array
from armillary.distribute.replica._collectives import ReplicaContext, is_argument
from armillary.distribute.replica._context import entered, write_changed
from armillary.distribute.replica._values import AXIS_NAME
from armillary.errors import (
    CapturedStateError,
    ReplicaContextError,
    StateStructureError,
)
from armillary.state._holders import is_claimed
from armillary.state._lift import State, as_array
from armillary.typing import PyTree

if TYPE_CHECKING:
    from armillary.distribute._strategy import Strategy


def run_traced(
    strategy: "Strategy",
    fn: Callable[..., PyTree],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    state: State,
) -> PyTree:
    """Binds `fn` as one call of the program that is traced, and updates `state`."""
    name = getattr(fn, "__name__", "the step")
    context = ReplicaContext(strategy, None, active=1)
    changed: list[int] = []
    result: list[Any] = []

    def run(slots: list[Any]) -> list[Any]:
        with state.swapped(slots), entered(strategy, context):
            returned = fn(*args, **kwargs)
            # Not a copy of an object that holds state.
            values, treedef = jax.tree.flatten(returned, is_leaf=state.holds)
            after = state.collect(slots, name)
        pairs = enumerate(zip(slots, after, strict=True))
        changed[:] = [i for i, (old, new) in pairs if old is not new]
        result[:] = [values, treedef]
        arrays = map(jnp.asarray, filter(is_array, values))
        return [*(after[i] for i in changed), *arrays]

    before = [as_array(leaf) for leaf in state.read()]
    with nothing_left(fn):
        program = jax.make_jaxpr(run, axis_env=[(AXIS_NAME, 1)])(before)
    outputs = _bind(program, before, name)
    write_changed(state, name, changed, outputs)
    values, treedef = result
    arrays = iter(outputs[len(changed) :])
    return treedef.unflatten(next(arrays) if is_array(v) else v for v in values)


@contextmanager
def nothing_left(fn: Callable[..., PyTree]) -> Iterator[None]:
    """Refuses a function that leaves an array of its trace in what it closes over.

    Raises:
        CapturedStateError: If it does.
    """
    before = {id(value) for _, value in _tracers_around(fn)}
    yield
    for name, value in _tracers_around(fn):
        if id(value) not in before:
            raise CapturedStateError(
                f"`{fn.__name__}` left an array in `{name}`, a name from around it, "
                "which would be a value of the trace of `strategy.run`. Return it: "
                "`strategy.run` returns what its function returns."
            )


def _tracers_around(fn: Callable[..., PyTree]) -> Iterator[tuple[str, Tracer]]:
    names = getattr(getattr(fn, "__code__", None), "co_freevars", ())
    for name, cell in zip(names, getattr(fn, "__closure__", None) or (), strict=True):
        with suppress(ValueError):  # The name has no value yet.
            held = cell.cell_contents
            values = held.values() if isinstance(held, dict) else held
            for value in values if isinstance(held, dict | list) else [held]:
                if isinstance(value, Tracer):
                    yield name, value


def _bind(program: core.ClosedJaxpr, arguments: list[Any], name: str) -> list[Any]:
    if not _names_axis(program):
        return call_program(program, arguments, name)
    outputs = jax.vmap(
        lambda _: call_program(program, arguments, name), axis_name=AXIS_NAME
    )(jnp.zeros(1))
    return [output[0] for output in outputs]


def _names_axis(program: core.ClosedJaxpr) -> bool:
    """Returns whether a program reduces over the axis, or asks for its index.

    Raises:
        ReplicaContextError: If it has an operation that JAX does not know for one.
    """
    is_named = False
    for jaxpr, _ in walk_programs(program):
        for equation in jaxpr.eqns:
            if AXIS_NAME not in named_axes(equation):
                continue
            name = equation.primitive.name
            if name.endswith("all_to_all"):  # Its result has another shape here.
                raise ReplicaContextError(
                    f"`{name}` at {source_line(equation)} exchanges parts of one "
                    "replica, which JAX cannot do. Leave it out where "
                    "`strategy.num_replicas_in_sync` is 1."
                )
            is_named = True
    return is_named


def run_in_place(
    strategy: "Strategy",
    context: ReplicaContext,
    fn: Callable[..., PyTree],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> PyTree:
    """Calls `fn` where it stands: its values stay what they are, concrete or not."""
    roots: list[tuple[Any, str]] = [(fn, "")]
    leaves = jax.tree.leaves((args, kwargs), is_leaf=is_argument)
    roots += [(leaf, "") for leaf in leaves if is_claimed(leaf)]
    state = State(roots)
    result: list[Any] = []

    def run(_: Any) -> list[Any]:
        move()
        with entered(strategy, context):
            result[:] = jax.tree.flatten(fn(*args, **kwargs), is_leaf=is_claimed)
        # Only what asks for the number of the replica has the axis, of length 1.
        return list(filter(_has_axis, [*result[0], *_read(state)]))

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


def _read(state: State) -> list[Any]:
    return [leaf for slot in state.slots for leaf in _read_slot(slot)]


def _read_slot(slot: Any) -> list[Any]:
    # Where no step goes on with it, it may have become something else.
    try:
        return slot.read()
    except StateStructureError:
        return []


def _has_axis(leaf: Any) -> bool:
    return isinstance(leaf, Tracer) and hasattr(leaf, "batch_dim")
