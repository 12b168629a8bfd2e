"""The values of Keras variables, read and set where they are."""

import sys
from typing import TYPE_CHECKING, Any

import jax

from armillary._optional import KERAS_ON_JAX

if TYPE_CHECKING:
    import keras


def check_backend() -> None:
    """Raises if the loaded Keras does not run on JAX."""
    backend = sys.modules["keras"].config.backend()
    if backend != "jax":
        raise ImportError(
            f"Keras runs on the backend {backend!r}, but Armillary needs JAX. "
            f"{KERAS_ON_JAX}"
        )


def is_unset(variable: "keras.Variable") -> bool:
    """Returns whether a variable has no value yet."""
    return getattr(variable, "_value", None) is None


def value_of(variable: "keras.Variable") -> Any:
    return variable._value


def set_value(variable: "keras.Variable", value: jax.Array) -> None:
    """Puts an array into a variable without moving it to another device."""
    variable._value = value
