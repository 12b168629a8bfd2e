"""What a walk passes by: values that cannot hold a user's state.

What a function reaches by name: closure, globals, defaults, `self`.
"""

import dis
import functools
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.core import Tracer

_COMPILED_FUNCTION = type(jax.jit(lambda: None))
FUNCTION_TYPES = (
    types.FunctionType,
    types.MethodType,
    functools.partial,
    _COMPILED_FUNCTION,
)
# Where a function leads to another one, under no name of its own.
_INNER = ("function", "wrapped")


class Entry(NamedTuple):
    """What a function holds under one name, and how to put another value there."""

    value: Any
    put: Callable[[Any], None] | None = None


def is_function(value: Any) -> bool:
    """Returns whether `value` is searched by what it captures."""
    # A method or a partial leads to the user's objects whoever wrote its function.
    is_bound = isinstance(value, functools.partial | types.MethodType)
    return is_bound or _is_of_user(value)


def captured(fn: Callable[..., Any]) -> Iterator[tuple[str, Any]]:
    """Yields what a function can reach by name, and what it wraps can."""
    for name, entry in entries_of(fn).items():
        if name in _INNER:
            yield from captured(entry.value)
        elif name != "code":
            yield name.partition(" #")[0], entry.value


def join_captured(path: str, name: str) -> str:
    """Returns the path of what a function at `path` captured."""
    name = "" if name in (*_INNER, "code") else name.partition(" #")[0]
    return f"{path}/{name}" if path and name else path or name


def entries_of(fn: Any) -> dict[str, Entry]:
    """Returns what a function captured itself, by name, each name once."""
    if isinstance(fn, functools.partial):
        pairs = [*enumerate(fn.args), *fn.keywords.items()]
        held = {
            f"argument {name}" if isinstance(name, int) else name: Entry(value)
            for name, value in pairs
        }
        return {"function": Entry(fn.func), **held}
    if isinstance(fn, types.MethodType):
        return {"self": Entry(fn.__self__), "function": Entry(fn.__func__)}
    if isinstance(fn, _COMPILED_FUNCTION):
        # Only a compiled function: a Python wrapper has a closure of its own, which
        # leads to the function it wraps.
        return {"wrapped": Entry(getattr(fn, "__wrapped__", None))}
    return dict(_entries_of_function(fn)) if _is_of_user(fn) else {}


def global_names(fn: Any) -> frozenset[str]:
    """Returns the names that a Python function looks up in its module."""
    if not isinstance(fn, types.FunctionType):
        return frozenset()
    return _global_names(fn.__code__).difference(fn.__code__.co_freevars)


def _entries_of_function(fn: types.FunctionType) -> Iterator[tuple[str, Entry]]:
    yield "code", Entry(fn.__code__)
    for name, cell in zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True):
        try:
            put = functools.partial(setattr, cell, "cell_contents")
            yield name, Entry(cell.cell_contents, put)
        except ValueError:  # a name that is assigned only later
            continue
    defaults = [*(fn.__defaults__ or ()), *(fn.__kwdefaults__ or {}).values()]
    for i, value in enumerate(defaults):
        yield f"default #{i}", Entry(value)
    for name in sorted(global_names(fn)):
        if name in fn.__globals__:
            put = functools.partial(fn.__globals__.__setitem__, name)
            yield name, Entry(fn.__globals__[name], put)
    # `armillary.function` and others keep what they wrap where no search looks.
    wrapped = getattr(fn, "__wrapped__", None)
    if wrapped is not None:
        yield "wrapped", Entry(wrapped)


def _is_of_user(value: Any) -> bool:
    """Returns whether `value` is a Python function of the user's, or one compiled."""
    if isinstance(value, _COMPILED_FUNCTION):
        return _is_of_user(getattr(value, "__wrapped__", None))
    if isinstance(value, functools.partial):
        return _is_of_user(value.func)
    if isinstance(value, types.MethodType):
        return _is_of_user(value.__func__)
    if not isinstance(value, types.FunctionType):
        return False
    module = value.__module__ or ""
    return not is_opaque_module(module) and module.partition(".")[0] != "flax"


@functools.lru_cache(maxsize=1024)
def _global_names(code: types.CodeType) -> frozenset[str]:
    # Not `co_names`, which holds the names of attributes too.
    names = {
        str(instruction.argval)
        for instruction in dis.get_instructions(code)
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME", "STORE_GLOBAL")
    }
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= _global_names(constant)
    return frozenset(names)


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
    "armillary.parameter_server._scheduled_fit.ScheduledSteps",
    "armillary.keras._trainer.KerasEvaluator",
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
