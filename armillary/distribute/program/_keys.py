"""Keys by which the program of a function is found again."""

import array
import functools
from collections.abc import Callable
from typing import Any

import jax

from armillary.distribute._global_arrays import is_array_or_number
from armillary.state._holders import is_claimed


def code_of(fn: Callable[..., Any]) -> Any:
    """Returns a key that is equal for functions with the same code."""
    while isinstance(fn, functools.partial):
        fn = fn.func
    return getattr(fn, "__code__", None) or id(fn)


def objects_of(leaves: list[Any]) -> list[Any]:
    """Returns the objects with state among the arguments of a function."""
    return [leaf for leaf in leaves if is_claimed(leaf)]


def argument_key(leaf: Any) -> Any:
    """Returns a key that is equal for arguments with the same program."""
    return jax.typeof(leaf) if is_array_or_number(leaf) else identity_of(leaf)


def identity_of(value: Any) -> Any:
    """Returns a key that is equal only for values that may share a program."""
    if isinstance(value, str | bytes | int | float | complex | bool | type(None)):
        # By `repr`, because 0.0 equals -0.0, and NaN does not equal itself.
        return type(value), repr(value)
    if isinstance(value, set):
        return set, frozenset(map(identity_of, value))
    if isinstance(value, bytearray | array.array):
        return type(value), getattr(value, "typecode", ""), bytes(value)
    return id(value)
