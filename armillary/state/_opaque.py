"""What a walk passes by: values that cannot hold a user's state."""

import functools
import sys
import types

import jax
import numpy as np
from jax.core import Tracer

_OPAQUE_PACKAGES = frozenset(sys.stdlib_module_names) | {
    "armillary",
    "datasets",
    "etils",
    "grain",
    "jax",
    "jaxlib",
    "keras",
    "numpy",
    "optax",
    "orbax",
    "rich",
    "tensorboard",
    "tensorboardX",
    "tensorflow",
    "torch",
}
# Classes of the standard library, and our own, that hold what a user puts into them. By
# name, so that none is imported for it.
_TRANSPARENT = {
    "armillary.distribute.parameter_server._scheduled_fit.ScheduledSteps",
    "armillary.keras._evaluator.KerasEvaluator",
    "armillary.keras._trainer.KerasTrainer",
    "armillary.estimator._runners.EstimatorEvaluator",
    "armillary.estimator._runners.EstimatorTrainer",
    "argparse.Namespace",
    "collections.ChainMap",
    "collections.UserDict",
    "collections.UserList",
    "types.SimpleNamespace",
}
PLAIN = frozenset(
    {
        str,
        bytes,
        int,
        float,
        complex,
        bool,
        type(None),
        type,
        slice,
        range,
        types.ModuleType,
        types.BuiltinFunctionType,
        types.CodeType,
    }
)
"""Types of values that hold nothing, and are told apart by looking at them."""


@functools.lru_cache(maxsize=4096)
def is_opaque(kind: type) -> bool:
    """Returns whether instances of `kind` cannot hold a user's state."""
    name = f"{kind.__module__}.{kind.__qualname__}"
    return name not in _TRANSPARENT and is_opaque_module(kind.__module__)


def is_opaque_module(name: str | None) -> bool:
    """Returns whether a module belongs to the standard library or the array stack."""
    return (name or "").partition(".")[0] in _OPAQUE_PACKAGES


def is_array(value: object) -> bool:
    """Returns whether a value is an array that a program can take."""
    # JAX runs Python code to answer, which a walk asks for every value.
    return _may_be_array(type(value)) and isinstance(value, jax.Array)


@functools.lru_cache(maxsize=4096)
def _may_be_array(kind: type) -> bool:
    return issubclass(kind, jax.Array | Tracer)


def is_equal(a: object, b: object) -> bool:
    """Returns whether two values make no difference to a program.

    Arrays of JAX never change; another one is another constant.
    """
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if isinstance(a, np.ndarray | np.generic):
        return is_same_array(np.asarray(a), np.asarray(b))
    if type(a).__hash__ is None or type(a).__eq__ is object.__eq__:
        return False
    try:
        return bool(a == b)
    except Exception:  # the comparison is the user's code
        return False


def is_same_array(a: np.ndarray, b: np.ndarray) -> bool:
    """Returns whether two NumPy arrays are the same, bit for bit."""
    return (
        a.shape == b.shape
        and a.dtype == b.dtype
        and (np.array_equal(a, b) or a.tobytes() == b.tobytes())
    )
