"""Finds variables that a traced step baked in as constants.

A variable that the trainer does not reach is not lifted: a step that reads it through a
closure or a global sees the value it had while tracing, for ever. After tracing, the
constants of the program are compared, by identity, with every live variable.
"""

import gc
import itertools
import types
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import jax
import numpy as np
from jax.extend import core

from armillary._checks import counted, list_lines
from armillary.errors import CapturedStateError, StateStructureError
from armillary.state import _keras, _nnx
from armillary.state._lift import State
from armillary.state._same import find_constants
from armillary.state._walk import Walk

if TYPE_CHECKING:
    import keras
    from flax import nnx

Variable: TypeAlias = "nnx.Variable | keras.Variable"


def check_captured(
    program: core.ClosedJaxpr, state: State, fn: Callable[..., Any], owner: str
) -> None:
    """Raises if a traced program holds an unlifted variable as a constant."""
    constants = set(map(id, filter(_may_be_held, find_constants(program))))
    if not constants:
        return
    lifted = {slot.key for slot in state.slots}
    named = _variables_by_name(fn)
    kept = {id(leaf) for leaf in state.read()}
    captured = [
        variable
        for variable in _live_variables()
        if id(variable) not in lifted
        and id(_value_of(variable)) in constants
        and (id(variable) in named or id(_value_of(variable)) not in kept)
    ]
    if captured:
        raise CapturedStateError(_message(captured, named, fn, owner, "reads"))


def write_error(
    fn: Callable[..., Any], state: State, owner: str
) -> CapturedStateError | None:
    """Returns the error for a step that wrote to an unlifted variable, if it did."""
    named = _variables_by_name(fn)
    lifted = {slot.key for slot in state.slots}
    unlifted = [variable for key, (_, variable) in named.items() if key not in lifted]
    if not unlifted:
        return None
    return CapturedStateError(_message(unlifted, named, fn, owner, "writes"))


def keras_write_error(
    fn: Callable[..., Any], state: State, owner: str, variable: "keras.Variable"
) -> Exception:
    """Returns the error for a step that writes to a Keras variable out of its reach."""
    if not _keras.is_unset(variable):
        named = _variables_by_name(fn)
        return CapturedStateError(_message([variable], named, fn, owner, "writes"))
    name = getattr(fn, "__name__", "the step")
    return StateStructureError(
        f"`{name}` makes the Keras variable `{variable.path}`, but a compiled program "
        "carries only variables that exist before it is traced. Build models and "
        "optimizers first: call the model with one batch (`model(batch)`), and then "
        "`optimizer.build(model.trainable_variables)`."
    )


def _may_be_held(constant: Any) -> bool:
    """Returns whether a variable may hold a constant: not one that JAX has made.

    JAX makes a NumPy array of a type of its own from each number in the user's code.
    """
    return isinstance(constant, jax.Array) or type(constant) is np.ndarray


def _live_variables() -> Iterator[Variable]:
    objects = gc.get_objects()
    # `type`, not `isinstance`: proxies among live objects may run code on access.
    types_ = list(map(type, objects))
    kinds = {
        kind
        for kind in set(types_)
        if _nnx.is_variable_type(kind) or _keras.is_variable_type(kind)
    }
    return itertools.compress(objects, map(kinds.__contains__, types_))


def _variables_by_name(
    fn: Callable[..., Any],
) -> dict[int, tuple[str, Variable]]:
    # The step may call other methods, and those may use globals of their own.
    owner = getattr(fn, "__self__", None)
    methods = [
        (method, "")
        for kind in (type(owner).__mro__ if owner is not None else ())
        for method in vars(kind).values()
        if isinstance(method, types.FunctionType)
    ]
    return {
        id(slot.variable): (slot.path, slot.variable)
        for slot in Walk([(fn, ""), *methods]).slots.values()
        if isinstance(slot, _nnx.NnxSlot | _keras.KerasSlot)
    }


def _value_of(variable: Any) -> Any:
    is_keras = _keras.is_variable(variable)
    return _keras.value_of(variable) if is_keras else variable._raw_value


def _message(
    variables: Sequence[Variable],
    named: dict[int, tuple[str, Variable]],
    fn: Callable[..., Any],
    owner: str,
    verb: str,
) -> str:
    name = getattr(fn, "__name__", "the step")
    lines, roots = [], []
    for variable in variables:
        library = "keras" if _keras.is_variable(variable) else "nnx"
        kind = f"{library}.{type(variable).__name__}"
        value = _value_of(variable)
        shape = getattr(value, "shape", ())
        if id(variable) in named:
            path = named[id(variable)][0]
            roots.append(path.partition("/")[0])
            lines.append(f"{path} ({kind} {tuple(shape)})")
        else:
            lines.append(f"a {kind} {tuple(shape)} that no name in `{name}` leads to")
    example = roots[0] if roots else "model"
    count = counted(len(variables), "variable")
    return (
        f"`{name}` {verb} {count} that {owner} does not reach, "
        "so they would be frozen into the compiled program:\n"
        f"{list_lines(lines, most=10)}\n"
        f"Assign what holds them to {owner} (`self.{example} = {example}` in "
        "`__init__`), or take their value as a constant on purpose "
        "(`jnp.asarray(variable[...])` outside the step)."
    )
