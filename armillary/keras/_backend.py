"""Keras, if it is installed and runs on JAX."""

import importlib
from typing import Any

from armillary.state._keras import check_backend


def import_keras() -> Any:
    """Returns the package `keras`."""
    try:
        keras = importlib.import_module("keras")
    except ImportError as error:
        if error.name == "keras":
            raise ImportError(
                "`armillary.keras` needs Keras, which is not installed. Install it "
                'with `pip install "armillary[keras]"`.'
            ) from error
        raise ImportError(
            f"Keras could not load its backend ({error}), and Armillary needs it on "
            "JAX. Set the environment variable `KERAS_BACKEND=jax` before the first "
            "`import keras`."
        ) from error
    check_backend()
    return keras
