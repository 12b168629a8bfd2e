"""One walk over everything that some objects reach: slots and plain values alike.

The walk follows attributes (those in `__slots__`, too), items and pytrees, and for
functions their closures and the globals their code names. It is a loop over a stack, so
that neither depth nor cycles end it.

What it leaves is a graph of `Node`s, each with what it held, by name. Two walks can be
compared: `compare` tells what a program that was traced after the first would not know.
"""

import collections
import functools
from collections.abc import Collection, Iterable, Iterator
from typing import Any, NamedTuple

from armillary.state import _keras, _nnx
from armillary.state._holders import (
    Part,
    are_plain,
    children_of,
    is_claimed,
    parts_of,
)
from armillary.state._opaque import PLAIN, global_names, is_array
from armillary.state._place import PlaceSlot
from armillary.state._slots import Role, Slot

# Of nests that are deeper (or reach themselves), JAX can make no tree.
_MAX_TREE_DEPTH = 100


class Node(NamedTuple):
    """A holder that was found."""

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

    Args:
        roots: Pairs of an object (or function) to search, and its path.

    Attributes:
        nodes: The holders, by their `id`, in the order of first discovery.
        slots: The slots, each place once, by their keys.
        constants: Arrays that nothing carries, such as those in a closure, by path.
        edges: Which holders each one leads to, with the name of the place.
    """

    def __init__(self, roots: Iterable[tuple[Any, str]]) -> None:
        self.roots = tuple(roots)
        self.nodes: dict[int, Node] = {}
        self.slots: dict[Any, Slot] = {}
        self.edges: dict[int, list[tuple[Any, int]]] = collections.defaultdict(list)
        self.constants: list[tuple[str, Any]] = []
        self._unsummed: set[int] = set()
        self._averaged: set[int] = set()
        self._tasks = [_Task(*root) for root in reversed(self.roots)]
        while self._tasks:
            self._visit(self._tasks.pop())
        for key in self._unsummed & self.slots.keys():
            self.slots[key].role = Role.PLAIN
        for key in self._averaged & self.slots.keys():
            self.slots[key].role = Role.BATCH_STATISTIC

    def _visit(self, task: _Task) -> None:
        value, path, part, name, above = task
        if type(value) in PLAIN:
            return
        if is_array(value):
            if part and part.has_places:
                self._add(PlaceSlot(part, name, path, is_claimed), above)
            else:
                self.constants.append((path, value))
            return
        if _nnx.is_variable(value) and id(value) not in self.slots:
            self._add(_nnx.NnxSlot(value, path), None)
        elif _keras.is_variable(value) and id(value) not in self.slots:
            if not _keras.is_unset(value):
                self._add(_keras.KerasSlot(value, path), None)
        elif (
            part and part.has_places and not is_claimed(value) and self._add_tree(task)
        ):
            return
        if above is not None:
            self.edges[above[0]].append((above[1], id(value)))
        if id(value) not in self.nodes and (parts := parts_of(value)):
            self.nodes[id(value)] = Node(value, path, parts)
            self._push(value, path, parts)

    def _push(self, value: Any, path: str, parts: list[Part]) -> None:
        is_node = _nnx.is_node(value)
        if is_node and not _nnx.merges_by_sum(value):
            self._unsummed.update(id(held) for part in parts for held in part.values)
        self._averaged.update(map(id, _keras.batch_statistics(value)))
        for part in reversed(parts):
            if are_plain(part.values):
                continue
            for name, held in zip(
                reversed(part.names), reversed(part.values), strict=True
            ):
                if type(held) not in PLAIN and not (is_node and _nnx.is_internal(name)):
                    place = part.path(path, name)
                    self._tasks.append(
                        _Task(held, place, part, name, (id(value), name))
                    )

    def _add_tree(self, task: _Task) -> bool:
        """Adds the place of a pytree with arrays; returns whether it is one."""
        value, path, part, name, above = task
        if part is None or not _holds_arrays(value):
            return False
        try:
            slot = PlaceSlot(part, name, path, is_claimed)
        except (TypeError, ValueError):
            # JAX cannot order it, such as a dict with mixed keys.
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

    def part_of(self, source: Any) -> Part | None:
        """Returns the part that a container was found as."""
        parts = (part for node in self.nodes.values() for part in node.parts)
        return next((part for part in parts if part.source is source), None)

    def reached_from(
        self,
        names: Collection[str] | None,
        but: Collection[tuple[int, Any]] = (),
    ) -> set[int]:
        """Returns the holders that these attributes of the first root lead to.

        `None` stands for all, and for all roots. Places in `but` lead to nothing.
        """
        first = None if names is None else id(self.roots[0][0])
        pending = [id(root) for root, _ in self.roots]
        reached: set[int] = set()
        while pending:
            current = pending.pop()
            if current not in reached:
                reached.add(current)
                pending += [
                    child
                    for name, child in self.edges.get(current, ())
                    if (current != first or name in (names or ()))
                    and (current, name) not in but
                ]
        return reached & self.nodes.keys()

    @functools.cached_property
    def globals(self) -> set[tuple[int, Any]]:
        """The globals of functions that lead to no state: they are constants."""
        leading = self.leading_to_slots()
        return {
            (holder, name)
            for holder, node in self.nodes.items()
            for name in global_names(node.value)
            if id(node.parts[0].held.get(name)) not in leading
        }

    def holding_slots(self) -> set[int]:
        """Returns the holders that are a slot, or hold one."""
        slots = self.slots.items()
        return {key if slot.holder is None else slot.holder for key, slot in slots}

    def leading_to_slots(self) -> set[int]:
        """Returns the holders that lead to a slot, or hold one."""
        parents: dict[int, list[int]] = collections.defaultdict(list)
        for parent, children in self.edges.items():
            for _, child in children:
                parents[child].append(parent)
        pending = list(self.holding_slots())
        found: set[int] = set()
        while pending:
            current = pending.pop()
            if current not in found:
                found.add(current)
                pending += parents[current]
        return found & self.nodes.keys()

    def restore(self, holders: Collection[int]) -> None:
        """Makes some of the holders hold what they held."""
        for holder in holders:
            for part in self.nodes[holder].parts:
                if not part.is_as_found():
                    part.restore()


def _holds_arrays(value: Any) -> bool:
    """Returns whether `value` is a tree, as JAX knows them, with arrays in it."""
    children = children_of(value)
    if are_plain(children):  # as most values have none
        return False
    has_arrays = False
    trail: list[tuple[Any, Iterator[Any]]] = [(value, iter(children))]
    # By `id`; kept, since a flattened object may have made them for the occasion.
    above: dict[int, Any] = {id(value): value}
    done: dict[int, Any] = {}
    while trail:
        if len(trail) > _MAX_TREE_DEPTH:
            return False
        for part in trail[-1][1]:
            has_arrays = has_arrays or is_array(part)
            if id(part) in above:
                return False
            if type(part) in PLAIN or id(part) in done:
                continue
            children = children_of(part)
            if not are_plain(children):
                above[id(part)] = part
                trail.append((part, iter(children)))
                break
        else:
            part, _ = trail.pop()
            above.pop(id(part), None)
            done[id(part)] = part
    return has_arrays
