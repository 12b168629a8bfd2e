"""What a walk looks into and what it passes by: functions, arrays and plain values.

A function is searched by what it reaches by name: closure, globals, defaults, `self`.
Values of libraries cannot hold a user's state, and plain ones hold nothing.
"""

import dis
import functools
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import numpy as np
from jax.core import Tracer

from armillary._frames import is_library

# Classes of libraries that hold what a user puts into them. By name, so that none is
# imported for it.
_TRANSPARENT = {
    "armillary.parameter_server._fit.ScheduledSteps",
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
        *(str, bytes, int, float, complex, bool, type(None), type, slice, range),
        *(types.ModuleType, types.BuiltinFunctionType, types.CodeType),
    }
)
"""Types of values that hold nothing, and are told apart by looking at them."""

ABSENT = type("Absent", (), {"__repr__": lambda _: "nothing"})()
"""What a place holds that is not there."""


@functools.lru_cache(maxsize=4096)
def is_opaque(kind: type) -> bool:
    """Returns whether instances of `kind` cannot hold a user's state."""
    name = f"{kind.__module__}.{kind.__qualname__}"
    if name in _TRANSPARENT or name.startswith(("flax.", "equinox.")):
        return False
    return is_library(kind.__module__)


def are_plain(values: Iterable[object]) -> bool:
    """Returns whether none of many values is a holder or an array."""
    return PLAIN.issuperset(map(type, values))


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
        a, b = np.asarray(a), np.asarray(b)
        is_alike = a.shape == b.shape and a.dtype == b.dtype
        return is_alike and (np.array_equal(a, b) or a.tobytes() == b.tobytes())
    if type(a).__hash__ is None and not isinstance(a, set):
        return False
    if type(a).__eq__ is object.__eq__:
        return False
    try:
        return bool(a == b)
    except Exception:  # the comparison is the user's code
        return False


_COMPILED_FUNCTION = type(jax.jit(lambda: None))
FUNCTION_TYPES = (
    types.FunctionType,
    types.MethodType,
    functools.partial,
    _COMPILED_FUNCTION,
)
# Where a function leads to another one, under no name of its own.
_INNER = ("function", "wrapped")


def is_function(value: Any) -> bool:
    """Returns whether `value` is searched by what it captures."""
    # A method or a partial leads to the user's objects whoever wrote its function.
    is_bound = isinstance(value, functools.partial | types.MethodType)
    return is_bound or _is_of_user(value)


def captured(fn: Callable[..., Any]) -> Iterator[tuple[str, Any]]:
    """Yields what a function can reach by name, and what it wraps can."""
    for name, value in entries_of(fn).items():
        if name in _INNER:
            yield from captured(value)
        elif name != "code":
            yield name.partition(" #")[0], value


def join_captured(path: str, name: str) -> str:
    """Returns the path of what a function at `path` captured."""
    name = "" if name in (*_INNER, "code") else name.partition(" #")[0]
    return f"{path}/{name}" if path and name else path or name


def entries_of(fn: Any) -> dict[str, Any]:
    """Returns what a function captured itself, by name, each name once."""
    if isinstance(fn, functools.partial):
        arguments = {f"argument {i}": value for i, value in enumerate(fn.args)}
        return {"function": fn.func, **arguments, **fn.keywords}
    if isinstance(fn, types.MethodType):
        return {"self": fn.__self__, "function": fn.__func__}
    if isinstance(fn, _COMPILED_FUNCTION):
        # Only a compiled function: a Python wrapper has a closure of its own, which
        # leads to the function it wraps.
        return {"wrapped": getattr(fn, "__wrapped__", None)}
    return _entries_of_function(fn) if _is_of_user(fn) else {}


def global_names(fn: Any) -> frozenset[str]:
    """Returns the names that a Python function looks up in its module."""
    if not isinstance(fn, types.FunctionType):
        return frozenset()
    return _global_names(fn.__code__).difference(fn.__code__.co_freevars)


def _entries_of_function(fn: types.FunctionType) -> dict[str, Any]:
    entries: dict[str, Any] = {"code": fn.__code__}
    for name, cell in zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True):
        try:
            entries[name] = cell.cell_contents
        except ValueError:  # a name that is assigned only later
            continue
    defaults = [*(fn.__defaults__ or ()), *(fn.__kwdefaults__ or {}).values()]
    entries |= {f"default #{i}": value for i, value in enumerate(defaults)}
    names = sorted(global_names(fn) & fn.__globals__.keys())
    entries |= {name: fn.__globals__[name] for name in names}
    # `armillary.function` and others keep what they wrap where no search looks.
    wrapped = getattr(fn, "__wrapped__", None)
    return entries if wrapped is None else entries | {"wrapped": wrapped}


def _is_of_user(value: Any) -> bool:
    """Returns whether `value` is a Python function of the user's, or one compiled."""
    if isinstance(value, _COMPILED_FUNCTION):
        return _is_of_user(getattr(value, "__wrapped__", None))
    if isinstance(value, functools.partial):
        return _is_of_user(value.func)
    if isinstance(value, types.MethodType):
        return _is_of_user(value.__func__)
    return isinstance(value, types.FunctionType) and not is_library(value.__module__)


@functools.lru_cache(maxsize=1024)
def _global_names(code: types.CodeType) -> frozenset[str]:
    # Not `co_names`, which holds the names of attributes too.
    names = {
        str(instruction.argval)
        for instruction in dis.get_instructions(code)
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME", "STORE_GLOBAL")
    }
    nested = (each for each in code.co_consts if isinstance(each, types.CodeType))
    return frozenset(names.union(*map(_global_names, nested)))
