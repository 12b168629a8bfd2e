"""Keeps values of a trace from getting where they outlive it, or are not expected.

An array of a trace that is left in a list or dictionary fails later, far from the line
that put it there. State that is written under a `jax.jit` of the user would hold such
arrays when that is done.
"""

import types
from collections.abc import Callable
from typing import Any

from jax.core import Tracer

from armillary._jaxpr import is_in_trace
from armillary.errors import CapturedStateError, ReplicaContextError
from armillary.state._lift import State
from armillary.state._place import PlaceSlot

_INSTEAD = (
    "Decorate the function that calls `strategy.run` with `@armillary.function` in "
    "place of `jax.jit`; inside the function that `strategy.run` gets, `nnx.jit` and "
    "the others work."
)


def check_no_trace(fn: Callable[..., Any], state: State) -> None:
    """Raises if a function with state is called under a transformation of JAX."""
    if not (is_in_trace() and state.slots):
        return
    name = getattr(fn, "__name__", "the function")
    paths = ", ".join(state.paths[:3])
    more = f" and {len(state.paths) - 3} more" if len(state.paths) > 3 else ""
    raise ReplicaContextError(
        f"`{name}` reads or writes variables ({paths}{more}), and was called inside "
        "`jax.jit`, `nnx.jit` or another transformation of JAX, which would leave its "
        f"own values in them. {_INSTEAD}"
    )


def add_trace_note(error: Exception) -> None:
    """Adds a note to Flax's error for variables from outside of a transformation."""
    if is_in_trace() and "different trace level" in str(error):
        error.add_note(_INSTEAD)


def check_nothing_left(fn: Callable[..., Any], owner: str) -> None:
    """Raises if a step, which was just traced, left an array where it stays."""
    # The step may call other methods, and those may use globals of their own.
    kinds = type(getattr(fn, "__self__", None)).__mro__
    methods = [value for kind in kinds for value in vars(kind).values()]
    python = [value for value in methods if isinstance(value, types.FunctionType)]
    # Not the object of a method, which is the state that was traced.
    functions = [getattr(fn, "__func__", fn), *python]
    left = [
        slot
        for slot in State([(function, "") for function in functions]).slots
        if isinstance(slot, PlaceSlot)
        if any(isinstance(leaf, Tracer) for leaf in slot.read())
    ]
    if not left:
        return
    for slot in left:
        slot.put(None)
    name = getattr(fn, "__name__", "the step")
    paths = sorted({slot.path.rpartition("/")[0] or slot.path for slot in left})
    shown = ", ".join(f"`{path}`" for path in paths)
    raise CapturedStateError(
        f"`{name}` put an array into {shown}, which {owner} does not carry from step "
        "to step: it would hold a value of the trace, once. Hold it in an array or a "
        f"metric of {owner}, and read that between loops; to print values, use "
        "`jax.debug.print`."
    )
