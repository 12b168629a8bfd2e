"""Knows the arrays that the library has made, and that no program has taken yet.

A program may donate such an array. An array of a user is copied first, because the user
may still hold it, and at a large model's first step the copies would double the state.
"""

import weakref
from collections.abc import Iterable
from typing import Any

import jax

# Arrays have no hash, so they are found by `id`, until they are gone.
_arrays: dict[int, "weakref.ref[jax.Array]"] = {}


def note_new(arrays: Iterable[jax.Array]) -> None:
    """Notes arrays that only the library and the objects that it fills hold."""
    for array in arrays:
        key = id(array)
        _arrays[key] = weakref.ref(array, lambda _, key=key: _arrays.pop(key, None))


def is_new(value: Any) -> bool:
    """Returns whether a value is such an array."""
    found = _arrays.get(id(value))
    return found is not None and found() is value
