"""Notices that a plain value has changed which a step knows by a global name.

`LR = 0.1` at the top of a module is a constant of the compiled step. The names that the
step's code loads, and that of the functions and methods that it calls by name, are
looked up again before each loop, which takes less than a microsecond for each.
"""

import dis
import types
from collections.abc import Callable, Iterator
from typing import Any

_PLAIN = (str, int, float)
_CALLED = ("LOAD_ATTR", "LOAD_METHOD")


class Globals:
    """The values of some functions, as they were when last asked for changes."""

    def __init__(self, *functions: Callable[..., Any]) -> None:
        self._values: dict[Any, tuple[dict[str, Any], Any]] = {}
        self._watched: set[Any] = set()
        self.watch(*functions)

    def watch(self, *functions: Callable[..., Any]) -> None:
        """Watches those of more functions, from what they are now."""
        for function in functions:
            code = getattr(function, "__func__", function)
            if code not in self._watched:
                self._watched.add(code)
                self._values = {**dict(_find(function)), **self._values}

    def changes(self) -> list[str]:
        """Returns what is another value than before, as `name: old became new`."""
        changes = []
        for (name, _), (namespace, old) in self._values.items():
            new = namespace.get(name)
            if new is not old and new != old:
                changes.append(f"{name}: {old!r:.60} became {new!r:.60}")
                self._values[name, id(namespace)] = (namespace, new)
        return changes


def _find(
    step_fn: Callable[..., Any],
) -> Iterator[tuple[tuple[str, int], tuple[dict[str, Any], Any]]]:
    owner = type(getattr(step_fn, "__self__", None))
    pending: list[Any] = [getattr(step_fn, "__func__", step_fn)]
    seen: set[int] = set()
    while pending:
        function = pending.pop()
        is_users = isinstance(function, types.FunctionType)
        if id(function) in seen or not is_users or _is_of_library(function):
            continue
        seen.add(id(function))
        namespace = function.__globals__
        for name, is_global in _names(function.__code__):
            if not is_global:
                pending.append(getattr(owner, name, None))
            elif isinstance(value := namespace.get(name), _PLAIN):
                yield (name, id(namespace)), (namespace, value)
            else:
                pending.append(value)


def _is_of_library(function: types.FunctionType) -> bool:
    return "site-packages" in function.__code__.co_filename


def _names(code: types.CodeType) -> Iterator[tuple[str, bool]]:
    """Yields the names that code looks up, and whether they are global."""
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("LOAD_GLOBAL", *_CALLED):
            yield str(instruction.argval), instruction.opname == "LOAD_GLOBAL"
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)
