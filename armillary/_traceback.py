"""What users call: its tracebacks show their lines, and its keywords are suggested.

A mistake in a step surfaces below twenty frames of the library. Like JAX, the library
removes its own frames from an exception that leaves it, and the traceback shows the
user's lines. `JAX_TRACEBACK_FILTERING=off`, which keeps the frames of JAX, also keeps
these.
"""

import contextlib
import difflib
import functools
import inspect
import linecache
import os
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ParamSpec, TypeVar

_P = ParamSpec("_P")
_R = TypeVar("_R")
_PACKAGE = os.path.dirname(os.path.abspath(__file__)) + os.sep
_SWITCH = "JAX_TRACEBACK_FILTERING"
_NOTE = f"Armillary has left its own frames out. Set {_SWITCH}=off to see them."


def hides_frames(
    function: Callable[_P, _R], answers: Mapping[str, str] | None = None
) -> Callable[_P, _R]:
    """Marks a function that users call.

    No exception brings own frames out of it, nor out of the iterator that a generator
    function returns. A keyword that it does not have gets its answer of `answers`, or
    is answered with the nearest one.
    """

    @functools.wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        try:
            return function(*args, **kwargs)
        except Exception as error:
            _leave(error, function, kwargs, answers)
            raise  # without this frame, as `_leave` has left it

    @functools.wraps(function)
    def iterate(*args: Any, **kwargs: Any) -> Any:
        try:
            generator: Any = function(*args, **kwargs)
            yield from generator
        except Exception as error:
            _leave(error, function, kwargs, answers)
            raise

    return iterate if inspect.isgeneratorfunction(function) else call


def mark_public(namespace: dict[str, Any]) -> None:
    """Marks the functions and constructors of a package's `__all__`, where they are."""
    for name in namespace["__all__"]:
        value = home = namespace.get(name)
        if isinstance(value, type):
            name = "__init__"
            home = next(cls for cls in value.__mro__ if name in vars(cls))
            value = vars(home)[name]
        if not isinstance(value, types.FunctionType) or hasattr(value, "__wrapped__"):
            continue
        code = value.__code__
        count = code.co_argcount - code.co_posonlyargcount + code.co_kwonlyargcount
        if value.__module__.startswith("armillary") and count > (name == "__init__"):
            marked = hides_frames(value)
            if home is value:
                home = sys.modules[value.__module__]
                namespace[name] = marked
            setattr(home, name, marked)


def _leave(
    error: Exception,
    function: Callable[..., Any],
    kwargs: Mapping[str, Any],
    answers: Mapping[str, str] | None,
) -> None:
    """Answers a wrong keyword, and hides own frames of what leaves a function."""
    if isinstance(error, TypeError) and _answer(error, function, kwargs, answers or {}):
        error.__traceback__ = None  # The caller's line is yet to come.
        return
    # A generator may be ended when Python has ended, and JAX is gone.
    config = getattr(sys.modules.get("jax"), "config", None)
    if config is None or config.values["jax_traceback_filtering"] != "off":
        _hide(error)


def _answer(
    error: TypeError,
    function: Callable[..., Any],
    kwargs: Mapping[str, Any],
    answers: Mapping[str, str],
) -> bool:
    """Says more in Python's error of a keyword, if a function does not have it."""
    known = _keywords(function) if kwargs else []
    unknown = [name for name in kwargs if known and name not in known]
    if not unknown:
        return False
    name, owner = unknown[0], function.__qualname__.removesuffix(".__init__")
    longer = [each for each in known if each.endswith(f"_{name}")]
    found = longer or difflib.get_close_matches(name, known, n=1)
    nearest = (
        f"Did you mean `{found[0]}`?"
        if found
        else f"It has {', '.join(f'`{each}`' for each in known)}."
    )
    error.args = (
        f"`{name}` is {kwargs[name]!r}, but `{owner}` has no such argument. "
        f"{answers.get(name) or nearest}",
    )
    return True


def _keywords(function: Callable[..., Any]) -> list[str]:
    """Returns the keywords that a function takes; of any keyword, none."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):  # Of some builtins.
        return []
    kinds = {each.kind for each in parameters.values()}
    if inspect.Parameter.VAR_KEYWORD in kinds:
        return []
    return [
        name
        for name, each in parameters.items()
        if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)
        and name != "self"
    ]


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
