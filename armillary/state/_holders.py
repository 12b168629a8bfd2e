"""The kinds of objects that a walk looks into, and how each kind holds others.

A *holder* is an object that can hold other objects, with one `Part` for each way of
holding. A function holds the objects that it reaches by name: its closure, globals,
defaults and `self`. Objects of libraries cannot hold a user's state, and plain values
hold nothing.
"""

import collections
import dataclasses
import dis
import functools
import operator
import types
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import numpy as np
from jax.core import Tracer

from armillary._owners import Owner, owner_of_class, owner_of_function
from armillary.state._adapters import is_object_type, node_adapter, variable_adapter
from armillary.state._parts import Contents, Part, Way
from armillary.state._slots import (
    ABSENT,
    PLAIN,
    Trait,
    has_own_trait,
    join_keys,
)

# Classes of Python that hold a user's objects. A class of this library has the trait
# `HOLDS_STATE`.
_TRANSPARENT = {
    "argparse.Namespace",
    "collections.ChainMap",
    "collections.UserDict",
    "collections.UserList",
    "types.SimpleNamespace",
}
# Descriptions of modules: constants with thousands of parts.
_CONSTANT = {"flax.nnx.graph.GraphDef", "flax.nnx.graphlib.GraphDef"}
COMPILED_FUNCTION = type(jax.jit(lambda: None))
FUNCTION_TYPES = (
    types.FunctionType,
    types.MethodType,
    functools.partial,
    COMPILED_FUNCTION,
)
# Entries of a function that lead to an inner function, and are not part of a path.
_INNER = ("function", "wrapped")


def join_captured(path: str, name: str) -> str:
    """Returns the path of a value that a function at `path` captured."""
    is_hidden = name in (*_INNER, "code")
    # Numbers only keep the names of defaults apart, so paths leave them out.
    shown = "" if is_hidden else name.partition(" #")[0]
    if path and shown:
        return f"{path}/{shown}"
    return path or shown


def look_at_items(source: dict[Any, Any]) -> Contents:
    while True:
        names = list(source)
        values = list(source.values())
        if len(names) == len(values):  # Otherwise another thread changed it.
            return names, values


def _look_at_sequence(source: Any) -> Contents:
    values = list(source)
    # A named tuple has names for its indices.
    names = getattr(source, "_fields", range(len(values)))
    return list(names), values


def _look_at_children(source: Any) -> Contents:
    entries, _ = jax.tree_util.tree_flatten_with_path(
        source, is_leaf=lambda part: part is not source
    )
    names = [join_keys("", keys) for keys, _ in entries]
    values = [value for _, value in entries]
    return names, values


def _look_at_members(source: Any) -> Contents:
    names: list[Any] = []
    values: list[Any] = []
    for name in _slot_names(type(source)):
        value = _get_member(source, name)
        if value is not ABSENT:
            names.append(name)
            values.append(value)
    return names, values


def _look_at_captured(source: Any) -> Contents:
    return look_at_items(entries_of(source))


def _get_member(source: Any, name: str) -> Any:
    try:
        return object.__getattribute__(source, name)  # runs no code of the user's
    except AttributeError:  # a name that is assigned only later
        return ABSENT


ITEMS = Way(look_at_items, put=operator.setitem)
ATTRIBUTES = Way(look_at_items, put=operator.setitem)
METADATA = Way(look_at_items)
SEQUENCE = Way(_look_at_sequence, put=operator.setitem)
_TUPLE = Way(_look_at_sequence)
_CHILDREN = Way(_look_at_children)
_MEMBERS = Way(_look_at_members, _get_member, object.__setattr__)
_CAPTURED = Way(_look_at_captured, join=join_captured)
_CONTAINERS: tuple[tuple[Any, Way], ...] = (
    (dict, ITEMS),
    (list | collections.deque, SEQUENCE),
    (tuple, _TUPLE),
)


@functools.lru_cache(maxsize=4096)
def is_opaque(kind: type) -> bool:
    """Returns whether instances of `kind` cannot hold a user's state."""
    name = f"{kind.__module__}.{kind.__qualname__}"
    if has_own_trait(kind, Trait.HOLDS_STATE):
        return False
    if name in _TRANSPARENT or name.startswith(("flax.", "equinox.")):
        return name in _CONSTANT
    return owner_of_class(kind) is Owner.LIBRARY


def part_of(source: Any, way: Way) -> Part:
    """Returns the names and values that an object holds in one way."""
    return Part(source, way, *way.look(source))


def parts_of(value: Any) -> list[Part]:
    """Returns the parts of `value`; an empty list if it is not a holder."""
    return _parts_fn(type(value))(value)


@functools.lru_cache(maxsize=4096)
def _parts_fn(kind: type) -> Callable[[Any], list[Part]]:
    """Returns the function that lists the parts of the instances of a class.

    A walk meets few classes and many objects, so the rules are applied once per class.
    """
    if _is_leaf(kind):
        return lambda _: []
    adapter = variable_adapter(kind)
    if adapter is not None:
        return adapter.parts_of_variable
    if issubclass(kind, FUNCTION_TYPES):
        return lambda value: [part_of(value, _CAPTURED)] if is_function(value) else []
    ways = [way for kinds, way in _CONTAINERS if issubclass(kind, kinds)]
    adapter = node_adapter(kind)
    # The metrics of this library are objects of NNX like any other.
    if is_opaque(kind) and adapter is None:
        return lambda value: [part_of(value, way) for way in ways]
    attributes = ATTRIBUTES if adapter is None else adapter.attributes
    # The attributes of such a node are its children.
    is_tree_node = adapter is not None and adapter.are_pytrees

    def parts_of_object(value: Any) -> list[Part]:
        parts = [part_of(value, way) for way in ways]
        held = attributes_of(value)
        if not (parts or is_tree_node or jax.tree_util.all_leaves([value])):
            children = part_of(value, _CHILDREN)
            # Before the attributes, because paths have these names. If the children
            # are the attributes, they are not listed twice.
            own = held or {}
            pairs = children.held.items()
            are_attributes = all(
                own.get(name, ABSENT) is child for name, child in pairs
            )
            if not are_attributes:
                parts.append(children)
        if held is not None and held is not value:
            parts.append(part_of(held, attributes))
        if _slot_names(kind):
            parts.append(part_of(value, _MEMBERS))
        return parts

    return parts_of_object


@functools.lru_cache(maxsize=4096)
def _is_leaf(kind: type) -> bool:
    leaves = jax.Array | Tracer | np.ndarray | np.generic | set | frozenset | type
    return kind in PLAIN or issubclass(kind, leaves)


def is_unchanging(part: Part) -> bool:
    """Returns whether a part cannot change: a tuple, or a frozen class's slots."""
    if part.way is _TUPLE:
        return True
    parameters = getattr(type(part.source), "__dataclass_params__", None)
    is_of_frozen = parameters is not None and parameters.frozen
    return part.way is _MEMBERS and is_of_frozen


def held_by(holder: Any) -> Iterator[tuple[Any, Any]]:
    """Yields the names and values in a holder, except for weak proxies.

    A proxy whose object is gone raises an error for every operation.
    """
    for part in parts_of(holder):
        for name, value in part.pairs:
            if type(value) not in weakref.ProxyTypes:
                yield name, value


def is_mutable_leaf(value: Any) -> bool:
    """Returns whether a value is mutable, but cannot hold a user's state."""
    if isinstance(value, set):
        return True
    return isinstance(value, np.ndarray) and bool(value.flags["W"])


def attributes_of(value: Any) -> dict[str, Any] | None:
    """Returns the `__dict__` of an object, and runs no code of its class."""
    try:
        found = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return None
    return found if isinstance(found, dict) else None


@functools.lru_cache(maxsize=1024)
def _slot_names(kind: type) -> tuple[str, ...]:
    """Returns the names in the `__slots__` of a class and its bases."""
    names: list[str] = []
    for base in reversed(kind.__mro__):
        if "__slots__" not in vars(base) or is_opaque(base):
            continue
        for name, member in vars(base).items():
            if isinstance(member, types.MemberDescriptorType):
                names.append(name)
    return tuple(names)


def is_claimed(value: Any) -> bool:
    """Returns whether a walk looks into a value itself, and not as a pytree."""
    kind = type(value)
    if _is_leaf(kind):
        return False
    if issubclass(kind, FUNCTION_TYPES):
        return is_function(value)
    if is_object_type(kind):
        return True
    if issubclass(kind, Iterator):
        return True  # It cannot be looked into, and JAX warns if told to flatten it.
    # A class that is registered as a pytree (an Equinox module, a Flax struct) is not
    # claimed: it is a value that consists of leaves.
    return jax.tree_util.all_leaves([value]) and bool(parts_of(value))


def children_of(value: Any) -> Iterable[Any]:
    """Returns the children of a pytree at its first level; none for a leaf."""
    kind = type(value)
    if kind in (dict, collections.OrderedDict, collections.defaultdict):
        return value.values()
    if kind in (list, tuple):
        return value
    if _is_leaf(kind):
        return ()
    if is_claimed(value) or jax.tree_util.all_leaves([value]):
        return ()
    return jax.tree.leaves(value, is_leaf=lambda part: part is not value)


def is_frozen(value: Any) -> bool:
    """Returns whether nothing can be assigned to a pytree: an Equinox module."""
    held = attributes_of(value)
    if not held or is_claimed(value) or not dataclasses.is_dataclass(value):
        return False
    name, own = next(iter(held.items()))
    try:
        setattr(value, name, own)  # the value that it has already
    except dataclasses.FrozenInstanceError:
        return True
    return False


def is_function(value: Any) -> bool:
    # A method or a partial can hold a user's objects, even around a library's function.
    is_bound = isinstance(value, functools.partial | types.MethodType)
    return is_bound or _is_of_user(value)


def captured(fn: Callable[..., Any]) -> Iterator[tuple[str, Any]]:
    """Yields the names and values that a function, or one inside it, can reach."""
    for name, value in entries_of(fn).items():
        if name in _INNER:
            yield from captured(value)
        elif name != "code":
            yield name.partition(" #")[0], value


def entries_of(fn: Any) -> dict[str, Any]:
    """Returns the values that a function itself captured, by name."""
    if isinstance(fn, functools.partial):
        arguments = {f"argument {i}": value for i, value in enumerate(fn.args)}
        return {"function": fn.func, **arguments, **fn.keywords}
    if isinstance(fn, types.MethodType):
        return {"self": fn.__self__, "function": fn.__func__}
    if isinstance(fn, COMPILED_FUNCTION):
        # Only for a compiled function: a Python wrapper has a closure that leads to
        # the function it wraps.
        return {"wrapped": getattr(fn, "__wrapped__", None)}
    return _entries_of_function(fn) if _is_of_user(fn) else {}


def global_names(fn: Any) -> frozenset[str]:
    """Returns the names that a Python function looks up in its module."""
    if not isinstance(fn, types.FunctionType):
        return frozenset()
    return _global_names(fn.__code__).difference(fn.__code__.co_freevars)


def _entries_of_function(fn: types.FunctionType) -> dict[str, Any]:
    """Returns the code, the closure, the defaults and the globals of a function."""
    entries: dict[str, Any] = {"code": fn.__code__}
    cells = fn.__closure__ or ()
    for name, cell in zip(fn.__code__.co_freevars, cells, strict=True):
        try:
            entries[name] = cell.cell_contents
        except ValueError:  # a name that is assigned only later
            continue

    by_position = fn.__defaults__ or ()
    by_name = fn.__kwdefaults__ or {}
    for index, value in enumerate([*by_position, *by_name.values()]):
        entries[f"default #{index}"] = value
    for name in sorted(global_names(fn) & fn.__globals__.keys()):
        entries[name] = fn.__globals__[name]

    # The objects of `armillary.function` are not searched for the function they wrap.
    wrapped = getattr(fn, "__wrapped__", None)
    if wrapped is not None:
        entries["wrapped"] = wrapped
    return entries


def _is_of_user(value: Any) -> bool:
    """Returns whether `value` is a function that the user wrote, compiled or not."""
    if isinstance(value, COMPILED_FUNCTION):
        return _is_of_user(getattr(value, "__wrapped__", None))
    if isinstance(value, functools.partial):
        return _is_of_user(value.func)
    if isinstance(value, types.MethodType):
        return _is_of_user(value.__func__)
    if not isinstance(value, types.FunctionType):
        return False
    return owner_of_function(value) is not Owner.LIBRARY


@functools.lru_cache(maxsize=1024)
def _global_names(code: types.CodeType) -> frozenset[str]:
    # `co_names` would not do, because it also holds the names of attributes.
    names = {
        str(instruction.argval)
        for instruction in dis.get_instructions(code)
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME", "STORE_GLOBAL")
    }
    nested = (
        constant for constant in code.co_consts if isinstance(constant, types.CodeType)
    )
    return frozenset(names.union(*map(_global_names, nested)))
