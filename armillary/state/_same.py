"""Tells whether two traced programs are the same, down to their constants."""

import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import numpy as np
from jax.extend import core

from armillary._jaxpr import walk_programs
from armillary.state._functions import entries_of, is_function
from armillary.state._opaque import is_equal


class Fingerprint:
    """What a program is, kept for comparison with one that is traced later."""

    def __init__(self, program: core.ClosedJaxpr) -> None:
        self._program = program
        self._constants = [_frozen(constant) for constant in find_constants(program)]

    def is_same(self, other: "Fingerprint") -> bool:
        """Returns whether two programs do the same, given the same arrays."""
        a, b = self._program, other._program
        return (
            _print(a) == _print(b)
            and _are_all(_is_same_constant, self._constants, other._constants)
            and _are_all(_is_same_callback, _find_callbacks(a), _find_callbacks(b))
        )


def _frozen(constant: Any) -> Any:
    """Returns what others cannot write into, as they may into a NumPy array."""
    is_array = hasattr(constant, "__array__") and not isinstance(constant, jax.Array)
    return np.array(constant) if is_array else constant


def find_constants(program: core.ClosedJaxpr) -> Iterator[Any]:
    """Yields the constants of a program and of every program nested in it."""
    for jaxpr, constants in walk_programs(program):
        yield from constants
        for equation in jaxpr.eqns:
            for operand in equation.invars:
                if isinstance(operand, core.Literal):
                    yield operand.val


def _find_callbacks(program: core.ClosedJaxpr) -> Iterator[Any]:
    for jaxpr, _ in walk_programs(program):
        for equation in jaxpr.eqns:
            if "callback" in equation.primitive.name:
                yield equation.params.get("callback", equation)


def _are_all(
    is_same: Callable[[Any, Any], bool], a: Iterable[Any], b: Iterable[Any]
) -> bool:
    first, second = list(a), list(b)
    return len(first) == len(second) and all(map(is_same, first, second))


def _is_same_constant(a: Any, b: Any) -> bool:
    if a is b:
        return True
    if isinstance(a, jax.Array) and jax.dtypes.issubdtype(a.dtype, jax.dtypes.extended):
        return a.dtype == getattr(b, "dtype", None) and _is_same_constant(
            jax.random.key_data(a), jax.random.key_data(b)
        )
    return is_equal(np.asarray(a), np.asarray(b))


def _is_same_callback(a: Any, b: Any) -> bool:
    """Returns whether two functions have the same code, and hold equal values.

    What they look up in an object is looked up when they run.
    """
    if is_equal(a, b):
        return True
    if type(a) is not type(b):
        return False
    if isinstance(a, jax.Array):
        return _is_same_constant(a, b)
    if isinstance(a, tuple | list):
        return _are_all(_is_same_callback, a, b)
    first, second = _held_by(a), _held_by(b)
    return (
        (bool(first) or isinstance(a, dict))
        and first.keys() == second.keys()
        and all(_is_same_callback(first[name], second[name]) for name in first)
    )


def _held_by(callback: Any) -> dict[Any, Any]:
    if isinstance(callback, dict):
        return callback
    if is_function(callback):
        return {name: entry.value for name, entry in entries_of(callback).items()}
    if hasattr(callback, "__code__"):  # one of JAX, around the user's
        cells = [cell.cell_contents for cell in callback.__closure__ or ()]
        return {"code": callback.__code__, "cells": cells}
    wrapped = getattr(callback, "callback_func", None)
    return {} if wrapped is None else {"function": wrapped}


def _print(program: core.ClosedJaxpr) -> str:
    # Functions inside a program print with their address, which is new in each trace.
    return re.sub(r"0x[0-9a-f]+", "", str(program))
