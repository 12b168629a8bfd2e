"""Finds every slot that an object or a function reaches.

The search follows attributes (those in `__slots__`, too), items and pytrees, and for
functions their closures and the globals their code names. It stops at objects that
cannot hold a user's state: modules, classes, and instances of the standard library and
of the array stack.
"""

import dis
import functools
import inspect
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import numpy as np

from armillary.state import _nnx
from armillary.state._place import PlaceSlot, is_array
from armillary.state._slots import Role, Slot, join, key_name

_OPAQUE_PACKAGES = frozenset(sys.stdlib_module_names) | {
    "armillary",
    "datasets",
    "etils",
    "grain",
    "jax",
    "jaxlib",
    "numpy",
    "optax",
    "orbax",
    "rich",
    "tensorboard",
    "tensorboardX",
    "tensorflow",
    "torch",
}
_COMPILED_FUNCTION = type(jax.jit(lambda: None))
_SCALARS = (str, bytes, int, float, complex, bool, type(None), np.ndarray, np.generic)


class Search:
    """One walk over objects, which collects slots in a fixed order.

    Attributes:
        slots: The slots, each place once, in the order of first discovery.
        nodes: NNX objects on the way, whose trace state must follow a lift.
        constants: Plain Python values (numbers, strings, flags) by (object, attribute),
            as (path, object, value). A traced step has them baked in.
        holders: The objects, functions and containers that were searched, by path.
    """

    def __init__(self) -> None:
        self.slots: list[Slot] = []
        self.nodes: list[Any] = []
        self.constants: dict[tuple[int, str], tuple[str, Any, Any]] = {}
        self.holders: list[tuple[Any, str]] = []
        self._seen: set[Any] = set()
        self._unsummed: set[int] = set()

    def visit(self, value: Any, path: str) -> None:
        """Searches `value` and everything it reaches."""
        if isinstance(value, _SCALARS) or is_array(value):
            return
        if _nnx.is_variable(value):
            self._add(_nnx.NnxSlot(value, path))
        elif isinstance(value, dict | list):
            if self._is_new(value, path):
                items = value.items() if isinstance(value, dict) else enumerate(value)
                for name, item in list(items):
                    self._visit_place(value, name, item, join(path, name))
        elif is_function(value):
            if self._is_new(value, path):
                for name, item in captured(value):
                    self._note_constant(value, name, item, join(path, name))
                    self.visit(item, join(path, name))
        elif is_object(value):
            if self._is_new(value, path):
                self._visit_object(value, path)
        else:
            self._visit_leaves(value, path)

    def _visit_object(self, value: Any, path: str) -> None:
        if _nnx.is_node(value):
            self.nodes.append(value)
            if not _nnx.merges_by_sum(value):
                self._unsummed.update(map(id, vars(value).values()))
        for name, item in list(held_by(value)):
            if not _nnx.is_attribute(name):
                continue
            self._note_constant(value, name, item, join(path, name))
            self._visit_place(value, name, item, join(path, name))

    def _note_constant(self, owner: Any, name: str, value: Any, path: str) -> None:
        if isinstance(value, str | int | float):
            self.constants[id(owner), name] = (path, owner, value)

    def _visit_place(self, owner: Any, name: Any, value: Any, path: str) -> None:
        if isinstance(value, _SCALARS):
            return
        if is_claimed(value):
            self.visit(value, path)
            return
        leaves = self._visit_leaves(value, path)
        if any(is_array(leaf) for leaf in leaves):
            self._add(PlaceSlot(owner, name, path, is_claimed))
        elif isinstance(value, dict | list):
            self.holders.append((value, path))
            for key, item in held_by(value):
                self._note_constant(value, str(key), item, join(path, key))

    def _visit_leaves(self, value: Any, path: str) -> list[Any]:
        try:
            entries, _ = jax.tree_util.tree_flatten_with_path(value, is_leaf=is_claimed)
        except (TypeError, ValueError):
            # Not a pytree that JAX can order, such as a dict with mixed keys: nothing
            # in it can be carried, and the check for captured state still covers it.
            return []
        for keys, leaf in entries:
            if leaf is value or is_claimed(leaf):
                leaf_path = path
                for entry in keys:
                    leaf_path = join(leaf_path, key_name(entry))
                if leaf is not value:
                    self.visit(leaf, leaf_path)
        return [leaf for _, leaf in entries]

    def _add(self, slot: Slot) -> None:
        if slot.key not in self._seen:
            self._seen.add(slot.key)
            if slot.key in self._unsummed:
                slot.role = Role.PLAIN
            self.slots.append(slot)

    def _is_new(self, value: Any, path: str) -> bool:
        marker = ("visited", id(value))
        if marker in self._seen:
            return False
        self._seen.add(marker)
        self.holders.append((value, path))
        return True


def held_by(holder: Any) -> Iterable[tuple[Any, Any]]:
    """Returns what a holder holds, by name."""
    if isinstance(holder, dict):
        return holder.items()
    if isinstance(holder, list):
        return enumerate(holder)
    if is_function(holder):
        return captured(holder)
    names = slot_names(type(holder))
    if not names:
        return vars(holder).items()
    return [*_held_in_slots(holder, names), *getattr(holder, "__dict__", {}).items()]


def _held_in_slots(holder: Any, names: Iterable[str]) -> Iterator[tuple[str, Any]]:
    for name in names:
        try:
            # Not `getattr`, which tells `recorded_reads`, and may run the user's code.
            yield name, object.__getattribute__(holder, name)
        except AttributeError:  # a name that is assigned only later
            continue


@functools.lru_cache(maxsize=1024)
def slot_names(kind: type) -> tuple[str, ...]:
    """Returns the attributes that instances of a class hold in `__slots__`."""
    return tuple(
        name
        for base in reversed(kind.__mro__)
        if "__slots__" in vars(base) and not is_opaque(base)
        for name, member in vars(base).items()
        if isinstance(member, types.MemberDescriptorType)
        and inspect.getattr_static(kind, name) is member
    )


def is_claimed(value: Any) -> bool:
    """Returns whether a value is searched on its own rather than as a pytree."""
    if isinstance(value, Iterator):
        return True  # It cannot be looked into, and JAX warns if told to flatten it.
    return _nnx.is_variable(value) or is_object(value) or is_function(value)


def is_object(value: Any) -> bool:
    """Returns whether `value` is an object whose attributes may hold state."""
    if _nnx.is_node(value) or isinstance(value, types.SimpleNamespace):
        return True
    if isinstance(value, type | jax.Array):
        return False
    if not (hasattr(value, "__dict__") or slot_names(type(value))):
        return False
    # A registered class (an Equinox module, a Flax struct) is a value made of leaves.
    return not is_opaque(type(value)) and jax.tree_util.all_leaves([value])


def is_opaque(kind: type) -> bool:
    """Returns whether instances of `kind` cannot hold a user's state."""
    return kind.__module__.partition(".")[0] in _OPAQUE_PACKAGES


def captured(fn: Callable[..., Any]) -> Iterator[tuple[str, Any]]:
    """Yields what a function can reach by name: closure, globals, defaults, `self`."""
    if isinstance(fn, functools.partial):
        yield from captured(fn.func)
        yield from ((f"argument {i}", value) for i, value in enumerate(fn.args))
        yield from fn.keywords.items()
        return
    if isinstance(fn, types.MethodType):
        yield "self", fn.__self__
        yield from captured(fn.__func__)
        return
    function = _function_of(fn)
    if function is None:
        return
    code = function.__code__
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:  # a name that is assigned only later
            continue
    for value in (
        *(function.__defaults__ or ()),
        *(function.__kwdefaults__ or {}).values(),
    ):
        yield "default", value
    for name in sorted(_global_names(code)):
        if name in function.__globals__:
            yield name, function.__globals__[name]
    # `armillary.function` and others keep what they wrap where no search looks.
    wrapped = getattr(function, "__wrapped__", None)
    if wrapped is not None:
        yield from captured(wrapped)


def is_function(value: Any) -> bool:
    """Returns whether `value` is searched by what it captures."""
    # A method or a partial leads to the user's objects whoever wrote its function.
    is_bound = isinstance(value, functools.partial | types.MethodType)
    return is_bound or _function_of(value) is not None


def _function_of(value: Any) -> types.FunctionType | None:
    """Returns the user's Python function behind a callable, if that is what it is."""
    if isinstance(value, functools.partial):
        return _function_of(value.func)
    if isinstance(value, types.MethodType):
        return _function_of(value.__func__)
    if isinstance(value, _COMPILED_FUNCTION):
        # Only a compiled function: a Python wrapper has a closure of its own, which
        # leads to the function it wraps.
        return _function_of(getattr(value, "__wrapped__", None))
    if not isinstance(value, types.FunctionType):
        return None
    root = (value.__module__ or "").partition(".")[0]
    return None if root in _OPAQUE_PACKAGES or root == "flax" else value


@functools.lru_cache(maxsize=1024)
def _global_names(code: types.CodeType) -> frozenset[str]:
    # Not `co_names`, which holds the names of attributes too.
    names = {
        str(instruction.argval)
        for instruction in dis.get_instructions(code)
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME")
    }
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= _global_names(constant)
    return frozenset(names)
