"""Tracebacks that show the user's lines: public functions hide the library's frames.

Like JAX, the library removes its own frames from an exception that leaves it, unless
`JAX_TRACEBACK_FILTERING=off`. On the way, errors about arguments and names get advice.
"""

import contextlib
import functools
import inspect
import linecache
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ParamSpec, TypeGuard, TypeVar

from armillary._owners import Owner, is_own_file, owner_of_class
from armillary.advice._called_arrays import explain_called_array
from armillary.advice._foreign_names import answer_names, find_answer
from armillary.advice._partial_arrays import explain_partial_array
from armillary.advice._wrong_calls import explain_wrong_call

_P = ParamSpec("_P")
_R = TypeVar("_R")
_SWITCH = "JAX_TRACEBACK_FILTERING"
_NOTE = f"Armillary has left its own frames out. Set {_SWITCH}=off to see them."


def hides_frames(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Marks a function that users call.

    Exceptions from it, or from the iterator of a generator function, have no frames of
    this library. The error for an unknown keyword names the new name of an old keyword,
    or the nearest keyword. The errors for missing arguments, and for arguments without
    a name, have advice as well.
    """

    @functools.wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        try:
            return function(*args, **kwargs)
        except Exception as error:
            _leave(error, function, args, kwargs)
            raise  # without this frame, as `_leave` has left it

    @functools.wraps(function)
    def iterate(*args: Any, **kwargs: Any) -> Any:
        try:
            generator: Any = function(*args, **kwargs)
            yield from generator
        except Exception as error:
            _leave(error, function, args, kwargs)
            raise

    return iterate if inspect.isgeneratorfunction(function) else call


def mark_public(namespace: dict[str, Any]) -> None:
    """Marks the names in a package's `__all__`, by default all of its names.

    The package and its classes also give advice for names of other libraries.
    """
    kinds = {name: type(value) for name, value in namespace.items() if name[0] != "_"}
    own = sorted(name for name in kinds if kinds[name] is not types.ModuleType)
    for name in namespace.setdefault("__all__", own):
        value: Any = namespace.get(name)
        if isinstance(value, type):
            home = next(kind for kind in value.__mro__ if "__init__" in vars(kind))
            constructor = vars(home)["__init__"]
            if _can_be_marked(constructor):
                setattr(home, "__init__", hides_frames(constructor))  # noqa: B010
        elif _can_be_marked(value):
            marked = hides_frames(value)
            namespace[name] = marked
            setattr(sys.modules[value.__module__], name, marked)
    answer_names(namespace)


def _can_be_marked(value: Any) -> TypeGuard[Callable[..., Any]]:
    """Returns whether a value is a function of this library that takes keywords.

    A function that is marked already, or wraps another function, is left alone.
    """
    if not isinstance(value, types.FunctionType) or hasattr(value, "__wrapped__"):
        return False
    code = value.__code__
    count = code.co_argcount - code.co_posonlyargcount + code.co_kwonlyargcount
    return value.__module__.startswith("armillary") and count > 0


def _leave(
    error: Exception,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> None:
    """Adds advice on wrong arguments, and hides own frames in an exception."""
    if isinstance(error, TypeError) and explain_wrong_call(
        error, function, args, kwargs
    ):
        error.__traceback__ = None  # Python adds the caller's line later.
        return

    if isinstance(error, AttributeError):
        _note_name(error)
    if isinstance(error, TypeError):
        add_note(error, explain_called_array(error))
    add_note(error, explain_partial_array(error))

    # A generator may be closed while Python exits, when JAX is gone.
    config = getattr(sys.modules.get("jax"), "config", None)
    if config is None or config.values["jax_traceback_filtering"] != "off":
        _hide(error)


def _note_name(error: AttributeError) -> None:
    """Adds advice on a name that objects of Flax, Keras or JAX do not have."""
    kind = type(error.obj)
    jax = sys.modules.get("jax")
    is_tracer = False
    if jax is not None and isinstance(error.obj, jax.Array):
        kind = jax.Array
        is_tracer = isinstance(error.obj, jax.core.Tracer)
    if error.name is None or owner_of_class(kind) is not Owner.LIBRARY:
        return
    answer = find_answer(kind, error.name)
    if jax is not None and is_tracer:
        answer = find_answer(jax.core.Tracer, error.name) or answer
    add_note(error, answer)


def add_note(error: Exception, note: str | None) -> None:
    """Adds a note to an error that does not have it yet."""
    if note is not None and note not in getattr(error, "__notes__", ()):
        error.add_note(note)


def _hide(error: BaseException) -> None:
    """Removes own frames from an exception and from all exceptions that led to it."""
    entries = list(_entries(error.__traceback__))
    notes = [note for note in getattr(error, "__notes__", ()) if note != _NOTE]
    # The note is added unless JAX has added its own, or Armillary raised the error.
    has_own_frames = any(map(_is_own, entries))
    has_note = any(_SWITCH in note for note in notes)
    if has_own_frames and not has_note and not _is_raised(entries[-1]):
        notes.append(_NOTE)
    if notes != getattr(error, "__notes__", []):
        error.__notes__ = notes

    pending: list[BaseException | None] = [error]
    seen: set[int] = set()
    while pending:
        current = pending.pop()
        if current is None or id(current) in seen:
            continue
        seen.add(id(current))
        current.__traceback__ = _without_own(current.__traceback__)
        pending += [current.__cause__, current.__context__]


def _without_own(trace: types.TracebackType | None) -> types.TracebackType | None:
    """Returns a traceback without the frames of this library."""
    kept = None
    for entry in reversed(list(_entries(trace))):
        if not _is_own(entry):
            line = entry.tb_lineno
            kept = types.TracebackType(kept, entry.tb_frame, entry.tb_lasti, line)
    return kept


def _is_raised(entry: types.TracebackType) -> bool:
    """Returns whether a `raise` statement of this package raised an exception."""
    file = entry.tb_frame.f_code.co_filename
    line = linecache.getline(file, entry.tb_lineno).strip()
    return _is_own(entry) and line.startswith("raise")


def _entries(trace: types.TracebackType | None) -> Iterator[types.TracebackType]:
    while trace is not None:
        yield trace
        trace = trace.tb_next


def _is_own(entry: types.TracebackType) -> bool:
    file = entry.tb_frame.f_code.co_filename
    # Context managers of this package run through `contextlib`.
    return is_own_file(file) or file == contextlib.__file__
