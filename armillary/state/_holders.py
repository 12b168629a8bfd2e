"""What may hold what: the kinds of objects that a walk looks into.

A *holder* is an object that others can be put into: an object with attributes, a
dictionary, a list, a function with its closure, a NumPy array. It has one `Part` for
each way of holding, which remembers what it held when it was looked at, and can put
that back.
"""

import collections
import dataclasses
import functools
import inspect
import operator
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import numpy as np
from jax.core import Tracer

from armillary.state import _keras, _nnx
from armillary.state._opaque import (
    FUNCTION_TYPES,
    PLAIN,
    entries_of,
    is_array,
    is_function,
    is_opaque,
    is_same_array,
    join_captured,
)
from armillary.state._slots import join, join_keys

_MANY_BYTES = 1 << 20
ABSENT = type("Absent", (), {"__repr__": lambda _: "nothing"})()
"""What a place holds that is not there."""


class Part:
    """One way in which an object holds others, and what it held when looked at.

    This one is that of tuples: only what they hold themselves can change.

    Attributes:
        source: What holds: a container, the `__dict__` of an object, a function.
        names: The names of the places, in order.
        values: What they held.
        has_places: Whether an array in it is state, rather than a constant.
        is_ordered: Whether the order of the names means something.
        has_views: Whether `views` shows all that can change.
    """

    has_places = False
    is_ordered = True
    has_views = True

    def __init__(self, source: Any) -> None:
        self.source = source
        self.names, self.values = self.look()

    def look(self) -> tuple[list[Any], list[Any]]:
        """Returns names and values as they are now."""
        names = getattr(self.source, "_fields", range(len(self.source)))
        return list(names), list(self.source)

    def get(self, name: Any) -> Any:
        """Returns what a place holds, or `ABSENT`."""
        return dict(zip(*self.look(), strict=True)).get(name, ABSENT)

    @property
    def held(self) -> dict[Any, Any]:
        """What the places held, by name."""
        return dict(zip(self.names, self.values, strict=True))

    def put(self, name: Any, value: Any) -> None:
        """Makes a place hold `value`."""
        self.source[name] = value

    def is_as_found(self) -> bool:
        """Returns whether the same names hold the same objects."""
        names, values = self.look()
        return names == self.names and all(map(operator.is_, values, self.values))

    def restore(self) -> None:
        """Makes the part hold what it held."""

    def views(self) -> list[tuple[Iterable[Any], list[Any]]]:
        """Returns live views of what can change, each with what it showed.

        Python compares them in C. Without `has_views`, `look` is all there is.
        """
        return []

    def path(self, path: str, name: Any) -> str:
        """Returns the path of a place, from that of the holder."""
        return join(path, name)


class Children(Part):
    """What JAX takes an object of a registered class to be made of."""

    def look(self) -> tuple[list[Any], list[Any]]:
        entries, _ = jax.tree_util.tree_flatten_with_path(
            self.source, is_leaf=lambda part: part is not self.source
        )
        return [join_keys("", keys) for keys, _ in entries], [v for _, v in entries]


class Items(Part):
    """The items of a dictionary."""

    has_places = True

    def look(self) -> tuple[list[Any], list[Any]]:
        while True:
            names, values = list(self.source), list(self.source.values())
            if len(names) == len(values):  # else another thread was at it
                return names, values

    def get(self, name: Any) -> Any:
        return self.source.get(name, ABSENT)

    def restore(self) -> None:
        kind = _keras.untracked_type(type(self.source))
        kind.clear(self.source)
        kind.update(self.source, self.held)

    def views(self) -> list[tuple[Iterable[Any], list[Any]]]:
        return [(self.source, self.names), (self.source.values(), self.values)]


class Attributes(Items):
    """The attributes that the `__dict__` of an object holds."""

    is_ordered = False

    def restore(self) -> None:
        # One by one: other threads may be looking at the object.
        for name in set(self.look()[0]).difference(self.names):
            del self.source[name]
        self.source.update(self.held)


class NodeAttributes(Attributes):
    """The attributes of an NNX object, which keeps a record of their names in one."""

    def views(self) -> list[tuple[Iterable[Any], list[Any]]]:
        return [(self.source.values(), self.values)]


class Metadata(Attributes):
    """What was set on an NNX variable."""

    has_places = False


class KerasAttributes(Attributes):
    """The attributes of a Keras object, but for what Keras keeps for itself."""

    has_views = False

    def look(self) -> tuple[list[Any], list[Any]]:
        names = _keras.visible_names(self.source)
        return names, [self.source[name] for name in names]

    def path(self, path: str, name: Any) -> str:
        return join(path, _keras.public_name(name))


class KerasVariable(Part):
    """What decides how a Keras variable is used."""

    has_views = False
    is_ordered = False

    def look(self) -> tuple[list[Any], list[Any]]:
        held = _keras.variable_attributes(self.source)
        return list(held), list(held.values())

    def restore(self) -> None:
        for name, value in self.held.items():
            setattr(self.source, name, value)


class Sequence(Part):
    """The items of a list or deque."""

    has_places = True

    def get(self, name: Any) -> Any:
        return self.source[name] if name < len(self.source) else ABSENT

    def restore(self) -> None:
        kind = _keras.untracked_type(type(self.source))
        kind.clear(self.source)
        kind.extend(self.source, self.values)

    def views(self) -> list[tuple[Iterable[Any], list[Any]]]:
        return [(self.source, self.values)]


class Elements(Part):
    """The elements of a set, which are names that hold nothing.

    What they hold themselves is not looked into: they are in no order.
    """

    is_ordered = False

    def look(self) -> tuple[list[Any], list[Any]]:
        return list(self.source), [None] * len(self.source)

    def restore(self) -> None:
        if isinstance(self.source, set):
            kind = _keras.untracked_type(type(self.source))
            kind.clear(self.source)
            kind.update(self.source, self.names)

    def views(self) -> list[tuple[Iterable[Any], list[Any]]]:
        return [(self.source, self.names)]


class Members(Part):
    """The attributes of an object that its class has in `__slots__`."""

    has_views = False
    has_places = True
    is_ordered = False

    def look(self) -> tuple[list[Any], list[Any]]:
        names = [n for n in slot_names(type(self.source)) if self.get(n) is not ABSENT]
        return names, [self.get(name) for name in names]

    def get(self, name: Any) -> Any:
        try:
            # Not `getattr`, which may run the user's code.
            return object.__getattribute__(self.source, name)
        except AttributeError:  # a name that is assigned only later
            return ABSENT

    def put(self, name: Any, value: Any) -> None:
        object.__setattr__(self.source, name, value)

    def restore(self) -> None:
        for name in set(self.look()[0]).difference(self.names):
            object.__delattr__(self.source, name)
        for name, value in self.held.items():
            self.put(name, value)


class Captured(Part):
    """What a function reaches by name."""

    has_views = False
    is_ordered = False

    def look(self) -> tuple[list[Any], list[Any]]:
        entries = entries_of(self.source)
        return list(entries), [entry.value for entry in entries.values()]

    def restore(self) -> None:
        before = self.held
        for name, entry in entries_of(self.source).items():
            if entry.put and name in before and entry.value is not before[name]:
                entry.put(before[name])

    def path(self, path: str, name: Any) -> str:
        return join_captured(path, name)


class Numbers(Part):
    """The numbers in a NumPy array, as one value, once they are copied."""

    copy: np.ndarray | None = None

    def look(self) -> tuple[list[Any], list[Any]]:
        return [], []

    def keep(self, is_read: bool) -> None:
        """Copies the numbers, so that a change can be told and undone."""
        if self.copy is None and (is_read or self.source.nbytes <= _MANY_BYTES):
            self.copy = self.source.copy()

    def is_as_found(self) -> bool:
        return self.copy is None or is_same_array(self.source, self.copy)

    def restore(self) -> None:
        if self.copy is not None:
            np.copyto(self.source, self.copy)


_CONTAINERS: tuple[tuple[Any, type[Part]], ...] = (
    (dict, Items),
    (list | collections.deque, Sequence),
    (tuple, Part),
    (set | frozenset, Elements),
)


def parts_of(value: Any) -> list[Part]:
    """Returns how `value` holds others; nothing if it is no holder."""
    return _parts_fn(type(value))(value)


@functools.lru_cache(maxsize=4096)
def _parts_fn(kind: type) -> Callable[[Any], list[Part]]:
    """Returns `parts_of` for values of one type."""
    if kind in PLAIN or issubclass(kind, jax.Array | Tracer | np.generic | type):
        return lambda _: []
    if issubclass(kind, np.ndarray):
        return lambda value: [Numbers(value)] if value.flags["W"] else []
    if _nnx.is_variable_type(kind):
        return lambda value: [Metadata(_nnx.metadata(value))]
    if _keras.is_variable_type(kind):
        return lambda value: [KerasVariable(value)]
    if issubclass(kind, FUNCTION_TYPES):
        return lambda value: [Captured(value)] if is_function(value) else []
    containers = [part for kinds, part in _CONTAINERS if issubclass(kind, kinds)]
    is_node, is_keras = _nnx.is_node_type(kind), _keras.is_node_type(kind)
    # The metrics of this library are objects of NNX like any other.
    if is_opaque(kind) and not (is_node or is_keras):
        return lambda value: [part(value) for part in containers]
    attributes = KerasAttributes if is_keras else Attributes
    attributes = NodeAttributes if is_node else attributes
    has_slots = bool(slot_names(kind))

    def parts_of_object(value: Any) -> list[Part]:
        parts = [part(value) for part in containers]
        held = attributes_of(value)
        if not (parts or is_node or jax.tree_util.all_leaves([value])):
            children = Children(value)
            # First, as its names are those of paths; and not twice.
            own, pairs = held or {}, children.held.items()
            if not all(own.get(name, ABSENT) is child for name, child in pairs):
                parts.append(children)
        if held is not None and held is not value:
            parts.append(attributes(held))
        if has_slots:
            parts.append(Members(value))
        return parts

    return parts_of_object


def held_by(holder: Any) -> Iterator[tuple[Any, Any]]:
    """Yields what a holder holds, by name."""
    for part in parts_of(holder):
        yield from zip(part.names, part.values, strict=True)


def attributes_of(value: Any) -> dict[str, Any] | None:
    """Returns the `__dict__` of an object, without telling its class."""
    try:
        found = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return None
    return found if isinstance(found, dict) else None


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
    """Returns whether a value is looked into on its own rather than as a pytree."""
    kind = type(value)
    if kind in PLAIN or is_array(value) or issubclass(kind, np.ndarray):
        return False
    if _nnx.is_variable_type(kind) or _nnx.is_node_type(kind):
        return True
    if _keras.is_variable_type(kind) or _keras.is_node_type(kind):
        return True
    if issubclass(kind, FUNCTION_TYPES):
        return is_function(value)
    if issubclass(kind, Iterator):
        return True  # It cannot be looked into, and JAX warns if told to flatten it.
    # A registered class (an Equinox module, a Flax struct) is a value made of leaves.
    return jax.tree_util.all_leaves([value]) and bool(parts_of(value))


def children_of(value: Any) -> Iterable[Any]:
    """Returns what a pytree holds at its first level; nothing for a leaf."""
    kind = type(value)
    if kind in (dict, collections.OrderedDict, collections.defaultdict):
        return value.values()
    if kind in (list, tuple):
        return value
    if kind in PLAIN or is_array(value) or issubclass(kind, np.ndarray | np.generic):
        return ()
    if is_claimed(value) or jax.tree_util.all_leaves([value]):
        return ()
    return jax.tree.leaves(value, is_leaf=lambda part: part is not value)


def is_frozen(value: Any) -> bool:
    """Returns whether nothing can be assigned to a pytree: an Equinox module."""
    held = attributes_of(value)
    if not held or is_claimed(value) or not dataclasses.is_dataclass(value):
        return False
    try:
        setattr(value, *next(iter(held.items())))  # what it holds
    except dataclasses.FrozenInstanceError:
        return True
    return False


def are_plain(values: Iterable[Any]) -> bool:
    """Returns whether none of many values is a holder or an array."""
    return PLAIN.issuperset(map(type, values))
