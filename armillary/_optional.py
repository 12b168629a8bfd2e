"""Packages that not every user has installed."""

import importlib
import os
import sys
from typing import Any

KERAS_ON_JAX = (
    'Write `os.environ["KERAS_BACKEND"] = "jax"` before the first `import keras`, or '
    "set the variable in the shell: `export KERAS_BACKEND=jax`."
)


def import_optional(module: str, title: str, extra: str, otherwise: str = "") -> Any:
    """Returns a module of a package that may be missing.

    Args:
        module: The name of the module.
        title: The subject of a message about the package.
        extra: The extra of this package that installs it.
        otherwise: Advice if the package is installed, but its import fails.

    Raises:
        ImportError: If the package is missing, or its import fails.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        is_installed = missing is None or missing.split(".")[0] != module.split(".")[0]
        if is_installed and otherwise:
            raise ImportError(
                f"{title} cannot be imported ({error}). {otherwise}"
            ) from error
        raise ImportError(
            f"{title} is not installed. Install the extra `{extra}` of Armillary: "
            f"`pip install '.[{extra}]'` in its checkout."
        ) from error


def import_keras() -> Any:
    """Returns the package `keras`, which fails if its backend is not installed."""
    title = "Keras, on which `armillary.keras` runs,"
    otherwise = (
        f"By default, Keras uses TensorFlow, but Armillary needs JAX. {KERAS_ON_JAX}"
    )
    return import_optional("keras", title, "keras", otherwise)


def loaded_keras() -> Any:
    """Returns the package `keras` if the program has imported it, or `None`."""
    module = sys.modules.get("keras")
    return module if hasattr(module, "Variable") else None


def import_ray() -> Any:
    """Returns the package `ray`."""
    # Ray sends no usage statistics, unless the user asked for it.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    title = "Ray, on which parameter servers and `armillary launch --ray` run,"
    return import_optional("ray", title, "ray")
