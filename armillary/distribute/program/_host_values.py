"""Notices values of the host that would be frozen into a traced step.

Python runs a step once, while it is traced. Numbers from `numpy.random` or `random`
would be constants of the compiled program: the same "random" numbers in every step. So
drawing them is an error, and reading the clock is a warning. The functions of these
modules are guarded while a step is traced, in the thread that traces. Generators that
the step reaches by name are compared before and after. What `next` takes from an
iterator is a constant as well, which is right for some: tracing again tells.
"""

import builtins
import contextlib
import functools
import random
import sys
import sysconfig
import threading
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from armillary._logging import logger
from armillary.errors import CapturedStateError
from armillary.state._holders import held_by
from armillary.state._opaque import captured

_TIMES = ("time", "time_ns", "perf_counter", "perf_counter_ns", "monotonic")
_NOT_DRAWN = ("seed", "getstate", "setstate", "get_state", "set_state", "default_rng")
_GUARDED: list[tuple[types.ModuleType, str]] = [
    (builtins, "next"),
    *((time, name) for name in _TIMES),
    *(
        (module, name)
        for module in (np.random, random)
        for name in module.__all__
        if name.islower() and name not in _NOT_DRAWN
    ),
]
_GENERATORS = (np.random.Generator, np.random.RandomState, random.Random)
_LIBRARIES = (
    sysconfig.get_path("stdlib"),
    str(Path(__file__).resolve().parents[2]),
)
_lock = threading.Lock()
_originals: list[Any] = []
_num_tracing = 0


class _Tracing(threading.local):
    step: "tuple[str, str] | None" = None
    # Where it called `next`.
    places: "list[str]" = []  # noqa: RUF012


_tracing = _Tracing()


@contextlib.contextmanager
def guarded_host_values(fn: Callable[..., Any], owner: str) -> Iterator[list[str]]:
    """Watches which values of the host a user's function reads while it is traced."""
    name = getattr(fn, "__name__", "the step")
    generators = dict(_find_generators(fn, set()))
    before = {path: _state_of(generators[path]) for path in generators}
    outer = _tracing.step, _tracing.places
    _tracing.step, _tracing.places = (name, owner), []
    _install()
    try:
        yield _tracing.places
    finally:
        _uninstall()
        _tracing.step, _tracing.places = outer
    for path, state in before.items():
        if _state_of(generators[path]) != state:
            raise CapturedStateError(_message(name, f"draws from `{path}`", owner))


def _install() -> None:
    global _num_tracing
    with _lock:
        _num_tracing += 1
        if _num_tracing == 1:
            for module, name in _GUARDED:
                call = getattr(module, name)
                _originals.append(call)
                setattr(module, name, _guard(f"{module.__name__}.{name}", call))


def _uninstall() -> None:
    global _num_tracing
    with _lock:
        _num_tracing -= 1
        if _num_tracing == 0:
            for (module, name), call in zip(_GUARDED, _originals, strict=True):
                setattr(module, name, call)
            _originals.clear()


def _guard(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(call)
    def guard(*args: Any, **kwargs: Any) -> Any:
        frame = sys._getframe(1)
        if _tracing.step is not None and not _is_of_library(frame.f_code.co_filename):
            where = f"{frame.f_code.co_filename}:{frame.f_lineno}"
            step, owner = _tracing.step
            if name == "builtins.next":
                if args and not type(args[0]).__module__.startswith("armillary."):
                    _tracing.places.append(where)
                return call(*args)
            if not name.startswith("time."):
                verb = f"calls `{name}` at {where}"
                raise CapturedStateError(_message(step, verb, owner))
            logger.warning(
                "`%s` calls `%s` at %s, once, while it is traced: the time is a "
                "constant of the compiled program. Take the time around `train`, or in "
                "`train_loop_begin` and `train_loop_end`.",
                step,
                name,
                where,
            )
        return call(*args, **kwargs)

    return guard


def _is_of_library(file: str) -> bool:
    return "site-packages" in file or file.startswith(_LIBRARIES)


def _find_generators(fn: Any, seen: set[int]) -> Iterator[tuple[str, Any]]:
    """Yields the generators that a function, or one that it calls, knows by name."""
    seen.add(id(fn))
    for name, value in captured(fn):
        if isinstance(value, _GENERATORS):
            yield name, value
        elif isinstance(value, types.FunctionType) and id(value) not in seen:
            yield from _find_generators(value, seen)
        elif name == "self":
            held = dict(held_by(value))
            yield from (
                (f"self.{key}", item)
                for key, item in held.items()
                if isinstance(item, _GENERATORS)
            )
            for holder in (held, *map(vars, type(value).__mro__)):
                for item in list(holder.values()):
                    if isinstance(item, types.FunctionType) and id(item) not in seen:
                        yield from _find_generators(item, seen)


def _state_of(generator: Any) -> str:
    if isinstance(generator, random.Random):
        return repr(generator.getstate())
    if isinstance(generator, np.random.RandomState):
        return repr(generator.get_state())
    return repr(generator.bit_generator.state)


def taken_message(step: str, place: str) -> str:
    """Returns what is wrong with a step that takes values from an iterator."""
    return (
        f"`{step}` takes a value with `next` at {place} while it is traced, and "
        "another one when it is traced again, so the first one would be a constant of "
        "the compiled program in every step. Take it outside and pass it as an "
        "argument, or give the data to the trainer and take it from the `iterator` of "
        "the step."
    )


def _message(step: str, verb: str, owner: str) -> str:
    return (
        f"`{step}` {verb} while it is traced, so the same numbers would be a constant "
        f"of the compiled program in every step. Draw from an `nnx.Rngs` that {owner} "
        "reaches (`jax.random.normal(rngs(), shape)`), put random numbers into the "
        "batches, or make a constant that is meant before the step."
    )
