"""One walk over everything that some objects reach: slots and plain values alike.

The walk follows attributes (those in `__slots__`, too), items and pytrees, and for
functions their closures and the globals their code names. It is a loop over a stack, so
that neither depth nor cycles end it. What it leaves is a graph of `Node`s, each with
what it held, by name: `facts` of two walks tell what a program that was traced after
the first would not know.
"""

import collections
import copy
import functools
from collections.abc import Callable, Collection, Iterable
from typing import Any, NamedTuple

from armillary.state import _keras, _nnx
from armillary.state._holders import (
    Part,
    children_of,
    is_claimed,
    is_mutable_leaf,
    parts_of,
)
from armillary.state._opaque import PLAIN, are_plain, global_names, is_array
from armillary.state._slots import Role, Slot

# Of nests that are deeper (or reach themselves), JAX can make no tree.
_MAX_TREE_DEPTH = 100
_MANY_BYTES = 1 << 20


class Node(NamedTuple):
    """A holder that was found; without parts, a value that can change in itself."""

    value: Any
    path: str
    parts: list[Part]


class _Task(NamedTuple):
    value: Any
    path: str
    part: Part | None = None
    name: Any = None
    above: tuple[int, Any] | None = None


class Walk:
    """One walk over objects, which collects slots and holders in a fixed order.

    `roots` are pairs of an object (or function) to search, and its path.
    """

    def __init__(self, roots: Iterable[tuple[Any, str]]) -> None:
        self.roots = tuple(roots)
        self.nodes: dict[int, Node] = {}
        self.slots: dict[Any, Slot] = {}
        # Which holders each one leads to, with the name of the place.
        self.edges: dict[int, list[tuple[Any, int]]] = collections.defaultdict(list)
        # Arrays that nothing carries, such as those in a closure, by path.
        self.constants: list[tuple[str, Any]] = []
        self._copies: dict[int, Any] = {}
        self._roles: dict[int, Role] = {}
        self._tasks = [_Task(*root) for root in reversed(self.roots)]
        while self._tasks:
            self._visit(self._tasks.pop())
        for key in self._roles.keys() & self.slots.keys():
            self.slots[key].role = self._roles[key]

    def _visit(self, task: _Task) -> None:
        value, path, _, _, above = task
        if type(value) in PLAIN:
            return
        if is_array(value):
            if not self._add_place(task):
                self.constants.append((path, value))
            return
        if _nnx.is_variable(value) and id(value) not in self.slots:
            self._add(_nnx.NnxSlot(value, path), None)
        elif _keras.is_variable(value) and id(value) not in self.slots:
            if not _keras.is_unset(value):
                self._add(_keras.KerasSlot(value, path), None)
        elif not is_claimed(value) and self._add_place(task):
            return
        if above is not None:
            self.edges[above[0]].append((above[1], id(value)))
        if id(value) in self.nodes:
            return
        parts = parts_of(value)
        if parts or is_mutable_leaf(value):
            self.nodes[id(value)] = Node(value, path, parts)
            self._push(value, path, parts)

    def _push(self, value: Any, path: str, parts: list[Part]) -> None:
        is_node = _nnx.is_node(value)
        if is_node and not _nnx.merges_by_sum(value):
            held = (id(each) for part in parts for each in part.values)
            self._roles.update(dict.fromkeys(held, Role.PLAIN))
        averages = map(id, _keras.batch_statistics(value))
        self._roles.update(dict.fromkeys(averages, Role.BATCH_STATISTIC))
        for part in reversed(parts):
            if are_plain(part.values):
                continue
            for name, held in reversed(part.pairs):
                if type(held) not in PLAIN and not (is_node and _nnx.is_internal(name)):
                    place = part.kind.join(path, name)
                    above = (id(value), name)
                    self._tasks.append(_Task(held, place, part, name, above))

    def _add_place(self, task: _Task) -> bool:
        """Adds the place of an array, or a pytree with arrays; returns if it is one."""
        value, path, part, name, above = task
        if part is None or part.kind.put is None:
            return False
        try:
            if not (is_array(value) or _holds_arrays(value)):
                return False
            get, put = part.kind.get, part.kind.put
            slot = Slot(part.source, name, path, get=get, put=put, is_leaf=is_claimed)
        except (RecursionError, TypeError, ValueError):
            # JAX makes no tree of it, such as of a dict with mixed keys.
            return False
        self._add(slot, above)
        self._tasks.extend(
            _Task(leaf, leaf_path, above=above)
            for leaf_path, leaf in reversed(slot.others)
        )
        return True

    def _add(self, slot: Slot, above: tuple[int, Any] | None) -> None:
        slot.holder = above and above[0]
        self.slots.setdefault(slot.key, slot)

    def reached_from(self, names: Collection[str] | None) -> set[int]:
        """Returns the holders that these attributes of the first root lead to."""
        first = None if names is None else id(self.roots[0][0])

        def below(holder: int) -> list[int]:
            return [
                child
                for name, child in self.edges.get(holder, ())
                if (holder != first or name in (names or ()))
                and (holder, name) not in self.globals
            ]

        return _spread((id(root) for root, _ in self.roots), below) & self.nodes.keys()

    @functools.cached_property
    def leading_to_slots(self) -> set[int]:
        """The holders that lead to a slot, or hold one."""
        parents: dict[int, list[int]] = collections.defaultdict(list)
        for parent, children in self.edges.items():
            for _, child in children:
                parents[child].append(parent)
        found = _spread(self.holding_slots(), lambda child: parents[child])
        return found & self.nodes.keys()

    def holding_slots(self) -> set[int]:
        """Returns the holders that are a slot, or hold one."""
        slots = self.slots.items()
        return {key if slot.holder is None else slot.holder for key, slot in slots}

    @functools.cached_property
    def globals(self) -> set[tuple[int, Any]]:
        """The globals of functions that lead to no state: they are constants."""
        return {
            (holder, name)
            for holder, node in self.nodes.items()
            for name in global_names(node.value)
            if id(node.parts[0].held.get(name)) not in self.leading_to_slots
        }

    def copy(self, holders: Collection[int], *, is_read: bool) -> list[tuple[Any, Any]]:
        """Copies what can change in itself; large arrays only if steps read them."""
        for holder in holders:
            value = self.nodes[holder].value
            if self.nodes[holder].parts or holder in self._copies:
                continue
            if is_read or getattr(value, "nbytes", 0) <= _MANY_BYTES:
                self._copies[holder] = copy.copy(value)
        reached = self._copies.keys() & holders
        return [(self.nodes[each].value, self._copies[each]) for each in reached]

    def fact(self, value: Any) -> Any:
        """Returns what a place held, to be compared with what it holds elsewhere."""
        node = self.nodes.get(id(value))
        if node is not None and node.parts:
            return Found(value, type(value), node.path)
        return self._copies.get(id(value), value)


class Found(NamedTuple):
    """A holder, with its type and the first path that leads to it."""

    value: Any
    kind: Any
    path: str


def _spread(start: Iterable[int], further: Callable[[int], Iterable[int]]) -> set[int]:
    """Returns all that can be reached."""
    pending, reached = list(start), set[int]()
    while pending:
        current = pending.pop()
        if current not in reached:
            reached.add(current)
            pending += further(current)
    return reached


def _holds_arrays(value: Any, above: tuple[int, ...] = ()) -> bool:
    """Returns whether `value` is a tree, as JAX knows them, with arrays in it."""
    if len(above) > _MAX_TREE_DEPTH or id(value) in above:
        raise RecursionError("no tree")
    children = children_of(value)
    if are_plain(children):  # as most values have none
        return False
    above = (*above, id(value))
    found = [
        is_array(child) or _holds_arrays(child, above)
        for child in children
        if type(child) not in PLAIN
    ]
    return any(found)
