"""Adapters for Python objects whose state a checkpoint saves and restores in place.

Each adapter has two methods, `get_state` and `set_state`, which users also give to
objects of their own. `armillary.checkpoint._packed` turns a state into JSON and arrays.
"""

import random
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from armillary.checkpoint._packed import is_storable
from armillary.data.sources._source import has_methods
from armillary.errors import CheckpointMismatchError


class Stateful(Protocol):
    """An object with a state that is not in arrays of JAX."""

    def get_state(self) -> Any: ...
    def set_state(self, state: Any) -> None: ...


def find_adapter(name: str, value: Any) -> Stateful | None:
    """Returns an adapter for a known kind of Python object, or `None`.

    Args:
        name: The name of the object in the checkpoint, for messages.
        value: The object.

    Raises:
        TypeError: If an array cannot be saved, or cannot be written to.
    """
    if isinstance(value, np.ndarray):
        return HostArray(name, value)
    if isinstance(value, np.random.Generator):
        return FunctionAdapter(name, value.bit_generator, _get_bits, _set_bits)
    if isinstance(value, np.random.BitGenerator):
        return FunctionAdapter(name, value, _get_bits, _set_bits)
    is_random = isinstance(value, random.Random) or value is random
    # A generator of the operating system has no state.
    if is_random and not isinstance(value, random.SystemRandom):
        return FunctionAdapter(name, value, _get_random, _set_random)
    return None


def is_generator(value: Any) -> bool:
    """Returns whether a value is a random number generator of Python or NumPy."""
    return isinstance(
        value, np.random.Generator | np.random.RandomState | random.Random
    )


def adapt_loader(name: str, value: Any) -> Stateful | None:
    """Returns an adapter for an object with `state_dict` and `load_state_dict`."""
    is_loader = has_methods(value, "state_dict", "load_state_dict")
    if isinstance(value, type) or not is_loader:
        return None
    return FunctionAdapter(name, value, _get_dictionary, _set_dictionary)


class HostArray:
    """The values of a NumPy array, written into the array itself."""

    def __init__(self, name: str, array: np.ndarray) -> None:
        is_plain = is_storable(array.dtype) and not isinstance(array, np.ma.MaskedArray)
        if not (is_plain and array.flags["W"]):
            problem = "cannot be written to" if is_plain else "does not hold numbers"
            raise TypeError(
                f"`{name}` is an array of dtype {array.dtype} and shape {array.shape} "
                f"that {problem}, so a checkpoint cannot restore it. Use an array of "
                "numbers that can be written to (`array.copy()`)."
            )
        self._name = name
        self._array = array

    def get_state(self) -> np.ndarray:
        return self._array

    def set_state(self, state: Any) -> None:
        array = self._array
        has = _describe(state)
        needs = _describe(array)
        if has != needs:
            raise CheckpointMismatchError(
                f"`{self._name}` is {needs} in the program, but {has} in the "
                "checkpoint. Make an array of the same dtype and shape as at the save."
            )
        array[...] = state


class FunctionAdapter:
    """An adapter that reads and writes the state of an object by two functions."""

    def __init__(
        self,
        name: str,
        value: Any,
        get: Callable[[Any], Any],
        put: Callable[[Any, Any], None],
    ) -> None:
        self._name = name
        self._value = value
        self._get = get
        self._put = put

    def get_state(self) -> Any:
        return self._get(self._value)

    def set_state(self, state: Any) -> None:
        try:
            self._put(self._value, state)
        except Exception as error:
            raise CheckpointMismatchError(
                f"`{self._name}` of type {type(self._value).__name__} refuses the "
                f"state in the checkpoint ({type(error).__name__}: {error}). Make the "
                "object in the same way as when the checkpoint was saved."
            ) from error


def _get_bits(bits: Any) -> Any:
    return bits.state


def _set_bits(bits: Any, state: Any) -> None:
    bits.state = state


def _get_dictionary(loader: Any) -> Any:
    return loader.state_dict()


def _set_dictionary(loader: Any, state: Any) -> None:
    loader.load_state_dict(state)


def _get_random(generator: Any) -> Any:
    # A method of an instance, or a function of the module.
    version, words, gauss = generator.getstate()
    return version, np.array(words, np.uint32), gauss


def _set_random(generator: Any, state: Any) -> None:
    version, words, gauss = state
    generator.setstate((version, tuple(words.tolist()), gauss))


def _describe(value: Any) -> str:
    if not isinstance(value, np.ndarray):
        return f"a state of type {type(value).__name__}"
    return f"{value.dtype.newbyteorder('=').name} {value.shape}"
