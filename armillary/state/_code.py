"""The values that a user's code reads by name: globals and class attributes.

A traced program has these values as constants. So this file reads the code of the
functions that a step may call, without running any. It collects the names that the code
looks up in its module, in other modules of the user, and in classes, and the values of
these names. A class or a module has many names, but only names in this code count.
"""

import functools
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from armillary._owners import Owner, owner_of_class, owner_of_function, owner_of_module
from armillary.state._holders import FUNCTION_TYPES, entries_of, global_names
from armillary.state._slots import ABSENT, PLAIN


class Lookup(NamedTuple):
    """A name that code looks up, and its value when the code was read."""

    path: str
    read: Callable[[], Any]
    value: Any
    # The value of a descriptor is made when the code asks for it, so a search of the
    # descriptor itself finds nothing.
    is_descriptor: bool = False


class Code:
    """The names that functions, and the functions that they call, may look up.

    `objects` are the objects that the functions work with. The code reaches their
    classes.
    """

    def __init__(self, functions: Iterable[Any], objects: Iterable[Any]) -> None:
        self.lookups: dict[tuple[int, str], Lookup] = {}
        self._functions: set[int] = set()
        self._names: set[str] = set()
        # Classes and modules in which the code may look up names.
        self._spaces: dict[int, Any] = {}
        for function in functions:
            self._add(function)
        for value in objects:
            self._add_classes(type(value))

        # A new space may use names that the earlier spaces have as well.
        before = None
        while before != self._count():
            before = self._count()
            for space in list(self._spaces.values()):
                self._look_into(space)

    def _count(self) -> tuple[int, int]:
        """Returns the numbers of names and of spaces that are known so far."""
        return len(self._names), len(self._spaces)

    def _add(self, value: Any) -> None:
        """Follows the value of a name."""
        kind = type(value)
        if issubclass(kind, type):
            self._add_classes(value)
        elif issubclass(kind, types.ModuleType):
            if owner_of_module(value) is Owner.USER:
                self._spaces.setdefault(id(value), value)
        elif issubclass(kind, FUNCTION_TYPES):
            self._add_function(value)
        elif kind not in PLAIN:
            self._add_classes(kind)

    def _add_classes(self, kind: type) -> None:
        for base in kind.__mro__:
            if owner_of_class(base) is Owner.USER:
                self._spaces.setdefault(id(base), base)

    def _add_function(self, function: Any) -> None:
        """Follows the names in the code of a function that the user wrote."""
        if id(function) in self._functions:
            return
        self._functions.add(id(function))

        is_python = isinstance(function, types.FunctionType)
        if is_python and owner_of_function(function) is not Owner.USER:
            # Installed packages do not change while a program runs, and are large.
            return

        entries = entries_of(function)
        code = entries.pop("code", None)
        if code is not None:
            self._names |= names_in(code)
            space = function.__globals__
            for name in global_names(function) & entries.keys():
                self._add_name(space, space, name, path=name)
            cells = function.__closure__ or ()
            for name, cell in zip(code.co_freevars, cells, strict=True):
                self._add_cell(name, cell)

        # The values may be functions, whose code belongs to the program, too.
        for value in entries.values():
            self._add(value)

    def _look_into(self, space: Any) -> None:
        """Follows the names of a class or module that code mentions."""
        is_class = isinstance(space, type)
        held = vars(space)
        names = self._names | _SPECIAL if is_class else self._names
        for name in names & held.keys():
            value = held[name]
            path = f"{space.__name__}/{name}"
            is_descriptor = is_class and hasattr(type(value), "__get__")
            # A function is watched as well, because the program may replace it.
            self._add_name(space, held, name, path, is_descriptor=is_descriptor)
            called = _function_of(value)
            if called is not None:
                self._add_function(called)
            elif not is_descriptor:
                self._add(value)

    def _add_name(
        self,
        owner: Any,
        names: Mapping[str, Any],
        name: str,
        path: str,
        *,
        is_descriptor: bool = False,
    ) -> None:
        key = (id(owner), name)
        if key not in self.lookups:
            read = functools.partial(names.get, name, ABSENT)
            self.lookups[key] = Lookup(path, read, names[name], is_descriptor)

    def _add_cell(self, name: str, cell: types.CellType) -> None:
        def read() -> Any:
            try:
                return cell.cell_contents
            except ValueError:  # The name is not assigned.
                return ABSENT

        key = (id(cell), name)
        if key not in self.lookups:
            self.lookups[key] = Lookup(name, read, read())

    def values(self) -> Iterator[tuple[Any, str]]:
        """Yields the mutable values of the names, with their paths."""
        of_code = (*FUNCTION_TYPES, types.ModuleType, type)
        for lookup in self.lookups.values():
            kind = type(lookup.value)
            is_mutable = kind not in PLAIN and not issubclass(kind, of_code)
            if is_mutable and not lookup.is_descriptor:
                yield lookup.value, lookup.path


# Python calls these methods without a mention of their names.
_SPECIAL = frozenset(
    f"__{name}__"
    for name in (
        *("init", "post_init", "call", "getattr", "getitem", "enter", "exit", "iter"),
        *("next", "len", "contains", "bool", "add", "radd", "sub", "rsub", "mul"),
        *("rmul", "matmul", "rmatmul", "truediv", "rtruediv", "pow", "neg", "eq"),
        *("lt", "gt", "le", "ge", "float", "int", "jax_array"),
    )
)


def _function_of(value: Any) -> Callable[..., Any] | None:
    """Returns the function that runs if a name in a class or module is used, if any."""
    if isinstance(value, staticmethod | classmethod):
        return value.__func__
    if isinstance(value, property):
        return value.fget
    if isinstance(value, functools.cached_property):
        return value.func
    return value if isinstance(value, FUNCTION_TYPES) else None


@functools.lru_cache(maxsize=4096)
def names_in(code: types.CodeType) -> frozenset[str]:
    """Returns the names that code looks up, also in calls of `getattr` with a text."""
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, str) and constant.isidentifier():
            names.add(constant)
        elif isinstance(constant, types.CodeType):
            names |= names_in(constant)
    return frozenset(names)
