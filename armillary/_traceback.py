"""Keeps the library's own frames out of the tracebacks of its users.

A mistake in a step surfaces below twenty frames of the library. Like JAX, the library
removes its own frames from an exception that leaves it, and the traceback shows the
user's lines. `JAX_TRACEBACK_FILTERING=off`, which keeps the frames of JAX, also keeps
these.
"""

import contextlib
import functools
import inspect
import linecache
import os
import types
from collections.abc import Callable, Iterator
from typing import Any, ParamSpec, TypeVar

import jax

_P = ParamSpec("_P")
_R = TypeVar("_R")
_PACKAGE = os.path.dirname(os.path.abspath(__file__)) + os.sep
_SWITCH = "JAX_TRACEBACK_FILTERING"
_NOTE = f"Armillary has left its own frames out. Set {_SWITCH}=off to see them."


def hides_frames(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Marks a function that users call: no exception brings own frames out of it.

    Nor out of the iterator that a generator function returns.
    """

    @functools.wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        with _Hiding():
            return function(*args, **kwargs)

    @functools.wraps(function)
    def iterate(*args: Any, **kwargs: Any) -> Any:
        with _Hiding():
            generator: Any = function(*args, **kwargs)
            yield from generator

    return iterate if inspect.isgeneratorfunction(function) else call


class _Hiding:
    """Hides own frames of an exception that leaves it."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        # A generator may be ended when Python has ended, and JAX is gone.
        if not isinstance(error, Exception):
            return
        if jax.config.values["jax_traceback_filtering"] != "off":
            _hide(error)


def _hide(error: BaseException) -> None:
    """Removes own frames from an exception and from all exceptions that led to it."""
    entries = list(_entries(error.__traceback__))
    _say_once(error, is_ours=any(map(_is_own, entries)) and not _is_raised(entries[-1]))
    pending: list[BaseException | None] = [error]
    seen: set[int] = set()
    while pending:
        current = pending.pop()
        if current is None or id(current) in seen:
            continue
        seen.add(id(current))
        kept = None
        for entry in reversed(list(_entries(current.__traceback__))):
            if not _is_own(entry):
                line = entry.tb_lineno
                kept = types.TracebackType(kept, entry.tb_frame, entry.tb_lasti, line)
        current.__traceback__ = kept
        pending += [current.__cause__, current.__context__]


def _say_once(error: BaseException, is_ours: bool) -> None:
    """Adds one note on the missing frames, unless JAX has added its own."""
    notes = [note for note in getattr(error, "__notes__", ()) if note != _NOTE]
    is_said = any(_SWITCH in note for note in notes)
    if is_ours and not is_said:
        notes.append(_NOTE)
    if notes != getattr(error, "__notes__", []):
        error.__notes__ = notes


def _is_raised(entry: types.TracebackType) -> bool:
    """Returns whether this package raised an exception itself, in its own words."""
    file = entry.tb_frame.f_code.co_filename
    line = linecache.getline(file, entry.tb_lineno).strip()
    return _is_own(entry) and line.startswith("raise")


def _entries(trace: types.TracebackType | None) -> Iterator[types.TracebackType]:
    while trace is not None:
        yield trace
        trace = trace.tb_next


def _is_own(entry: types.TracebackType) -> bool:
    file = entry.tb_frame.f_code.co_filename
    # Through `contextlib` run the context managers of this package.
    return file.startswith(_PACKAGE) or file == contextlib.__file__
