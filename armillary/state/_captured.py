"""Finds variables that a traced program holds as constants, and compares programs.

A variable that the trainer does not reach is not lifted. The program then uses the
variable's value at the time of the trace forever. So the constants of a program are
compared, by identity, with the values of all live variables.
"""

import gc
import re
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend import core

from armillary._checks import counted, list_lines
from armillary._jaxpr import walk_equations, walk_programs
from armillary.errors import CapturedStateError
from armillary.state._adapters import adapter_of, value_of, variable_adapter
from armillary.state._holders import entries_of, is_function
from armillary.state._lift import State
from armillary.state._slots import is_equal
from armillary.state._walk import slots_of


class Fingerprint:
    """A program, kept for comparison with programs that are traced later."""

    def __init__(self, program: core.ClosedJaxpr) -> None:
        self._program = program
        # NumPy arrays are copied, since others may write into them.
        self._constants = [
            constant if isinstance(constant, jax.Array) else np.array(constant)
            for constant in find_constants(program)
        ]

    def is_same(self, other: "Fingerprint") -> bool:
        """Returns whether two programs compute the same, given the same arrays."""
        a = self._program
        b = other._program
        return (
            print_program(a) == print_program(b)
            and _is_same(self._constants, other._constants)
            and _is_same(_find_callbacks(a), _find_callbacks(b))
        )


def print_program(program: core.ClosedJaxpr) -> str:
    """Returns the text of a program, without addresses of Python objects."""
    # Functions inside a program print with their address, which is new each time.
    return re.sub(r"0x[0-9a-f]+", "", str(program))


def find_constants(program: core.ClosedJaxpr) -> Iterator[Any]:
    """Yields the constants of a program and of every program nested in it."""
    for jaxpr, constants in walk_programs(program):
        yield from constants
        for equation in jaxpr.eqns:
            for operand in equation.invars:
                if isinstance(operand, core.Literal):
                    yield operand.val


def _find_callbacks(program: core.ClosedJaxpr) -> list[Any]:
    return [
        equation.params.get("callback", equation)
        for equation in walk_equations(program)
        if "callback" in equation.primitive.name
    ]


def _is_same(a: Any, b: Any) -> bool:
    """Returns whether constants are equal, or functions with equal closures."""
    if is_equal(a, b):
        return True
    if isinstance(a, jax.Array) and isinstance(b, jax.Array):
        return _are_same_arrays(a, b)
    if type(a) is not type(b):
        return False
    if isinstance(a, tuple | list):
        return len(a) == len(b) and all(map(_is_same, a, b))

    first = _held_by(a)
    second = _held_by(b)
    can_be_compared = bool(first) or isinstance(a, dict)
    has_same_names = first.keys() == second.keys()
    if not can_be_compared or not has_same_names:
        return False
    return all(_is_same(first[name], second[name]) for name in first)


def _are_same_arrays(a: jax.Array, b: jax.Array) -> bool:
    is_of_keys = jax.dtypes.issubdtype(a.dtype, jax.dtypes.extended)
    if not is_of_keys:
        return is_equal(np.asarray(a), np.asarray(b))
    if a.dtype != b.dtype:
        return False
    # NumPy has no random keys.
    first = jax.random.key_data(a)
    second = jax.random.key_data(b)
    return _is_same(first, second)


def _held_by(callback: Any) -> dict[Any, Any]:
    if isinstance(callback, dict):
        return callback
    if is_function(callback):
        return entries_of(callback)
    if hasattr(callback, "__code__"):  # JAX's function around the user's function
        cells = [cell.cell_contents for cell in callback.__closure__ or ()]
        return {"code": callback.__code__, "cells": cells}
    wrapped = getattr(callback, "callback_func", None)
    if wrapped is None:
        return {}
    return {"function": wrapped}


def check_captured(
    program: core.ClosedJaxpr,
    state: State,
    fn: Callable[..., Any],
    owner: str,
) -> None:
    """Raises if a traced program holds an unlifted variable as a constant."""
    # `type`, not `isinstance`: JAX turns each number in the user's code into an array
    # of a subclass of `np.ndarray`.
    constants = {
        id(constant)
        for constant in find_constants(program)
        if isinstance(constant, jax.Array) or type(constant) is np.ndarray
    }
    if not constants:
        return

    lifted = {slot.key for slot in state.slots}
    named = _variables_by_name(fn)
    kept = {id(leaf) for leaf in state.read()}
    captured: list[Any] = []
    for variable in _find_variables():
        value = id(value_of(variable))
        if id(variable) in lifted or value not in constants:
            continue
        # Two variables may hold the same array, and the step may read the lifted one.
        if id(variable) in named or value not in kept:
            captured.append(variable)
    if captured:
        raise _error(captured, named, fn, owner, "reads")


def _find_variables() -> Iterator[Any]:
    """Yields all variables that are alive in this process."""
    # `type`, not `isinstance`: proxies among live objects may run code on access.
    living = gc.get_objects()
    found = set(map(type, living))
    kinds = {kind for kind in found if variable_adapter(kind) is not None}
    for value in living:
        if type(value) in kinds:
            yield value


def write_error(
    fn: Callable[..., Any], state: State, owner: str
) -> CapturedStateError | None:
    """Returns the error for a step that wrote to an unlifted variable, if it did."""
    named = _variables_by_name(fn)
    lifted = {slot.key for slot in state.slots}
    unlifted = [variable for key, (_, variable) in named.items() if key not in lifted]
    if not unlifted:
        return None
    return _error(unlifted, named, fn, owner, "writes")


def guarded_write_error(fn: Callable[..., Any], owner: str, variable: Any) -> Exception:
    """Returns the error for a step that writes to a variable out of its reach."""
    step = getattr(fn, "__name__", "the step")
    creation = adapter_of(variable).explain_creation(variable, step)
    if creation is not None:
        return creation
    return _error([variable], _variables_by_name(fn), fn, owner, "writes")


def _variables_by_name(fn: Callable[..., Any]) -> dict[int, tuple[str, Any]]:
    """Returns the variables that a function reaches, with their paths, by `id`."""
    roots = [(function, "") for function in (fn, *methods_of(fn))]
    named: dict[int, tuple[str, Any]] = {}
    for slot in slots_of(roots):
        if slot.variable is not None:
            named[id(slot.variable)] = (slot.path, slot.variable)
    return named


def methods_of(fn: Callable[..., Any]) -> list[types.FunctionType]:
    """Returns the methods that a step may call, because they may use other globals."""
    kinds = type(getattr(fn, "__self__", None)).__mro__
    held = (value for kind in kinds for value in vars(kind).values())
    return [value for value in held if isinstance(value, types.FunctionType)]


def _error(
    variables: Sequence[Any],
    named: dict[int, tuple[str, Any]],
    fn: Callable[..., Any],
    owner: str,
    verb: str,
) -> CapturedStateError:
    """Returns the error for variables that a step uses, and its owner lacks."""
    lines: list[str] = []
    roots: list[str] = []
    for variable in variables:
        library = adapter_of(variable).name
        shape = tuple(getattr(value_of(variable), "shape", ()))
        path = "a variable without a name"
        if id(variable) in named:
            path, _ = named[id(variable)]
            roots.append(path.partition("/")[0])
        lines.append(f"{path} ({library}.{type(variable).__name__} {shape})")
    step = getattr(fn, "__name__", "the step")
    example = roots[0] if roots else "model"
    return CapturedStateError(
        f"`{step}` {verb} {counted(len(variables), 'variable')} that {owner} does not "
        "reach, so they would be frozen into the compiled program:\n"
        f"{list_lines(lines, most=10)}\n"
        f"Assign what holds them to {owner} (`self.{example} = {example}` in "
        "`__init__`), or take their value as a constant on purpose "
        "(`jnp.asarray(variable[...])` outside the step)."
    )
