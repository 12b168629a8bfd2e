"""Notices that the user's objects hold something new, and tells what.

A walk takes long, and hardly ever finds anything that the last one did not. So what
every holder held is remembered, and compared by identity, in passes that Python makes
in C. Only holders that a step may have looked at matter, and those that lead to state.

What another walk found is told by the difference of two dictionaries of plain values,
by path. In them, objects are alike if they have the same type and the same place: that
they are others does not matter, since a program knows none. So a metric that is made
anew for every loop changes nothing, and a number anywhere in a nest does.
"""

import collections
import itertools
import operator
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from armillary.state import _nnx
from armillary.state._holders import (
    ATTRIBUTES,
    ITEMS,
    METADATA,
    SEQUENCE,
    Part,
    part_of,
)
from armillary.state._opaque import ABSENT, PLAIN, is_equal
from armillary.state._slots import describe
from armillary.state._walk import Found, Walk

_END = object()


class Watch:
    """Watches the holders that a walk found, except for slots and constants.

    Of the first root, the attributes of these names matter; `None` stands for all.
    """

    def __init__(self, walk: Walk, names: Collection[str] | None) -> None:
        reached, leading = walk.reached_from(names), walk.leading_to_slots
        root = 0 if names is None else id(walk.roots[0][0])
        without: dict[int, set[Any]] = collections.defaultdict(set)
        for key in (*walk.slots, *walk.globals):
            if isinstance(key, tuple):
                without[key[0]].add(key[1])
        # What is iterated over to see what is held; and parts to look at again.
        self._views: list[Iterable[Any]] = []
        self._looks: list[tuple[Part, Collection[Any], list[str] | None]] = []
        self._metadata: list[tuple[Any, Any]] = []
        held: list[Any] = []
        for holder in reached | leading:
            for part in walk.nodes[holder].parts:
                left_out = without.get(id(part.source), ())
                if holder == root:
                    leads = {n for n, child in walk.edges[root] if child in leading}
                    only = sorted({*leads, *(names or ())}.difference(left_out))
                    self._looks.append((part, (), only))
                elif part.kind is METADATA:
                    self._metadata.append((part.source, part.held))
                elif left_out or part.kind not in (ITEMS, ATTRIBUTES, SEQUENCE):
                    self._looks.append((part, left_out, None))
                elif part.kind is SEQUENCE:
                    self._views.append(part.source)
                    held += part.values
                else:
                    # An object of NNX has a record of their names among the values.
                    if not _nnx.is_node(walk.nodes[holder].value):
                        self._views.append(part.source)
                        held += part.names
                    self._views.append(part.source.values())
                    held += part.values
        rest = itertools.chain.from_iterable(_pick(*look) for look in self._looks)
        self._held = [*held, *rest, _END]
        self._copies = walk.copy(reached | leading, is_read=names is not None)

    def is_current(self) -> bool:
        """Returns whether the holders hold what they held at first."""
        looks = (
            _pick(part_of(part.source, part.kind), left_out, only)
            for part, left_out, only in self._looks
        )
        # `_END` comes last, and no value before it is that.
        now = itertools.chain.from_iterable([*self._views, *looks, (_END,)])
        return (
            all(map(operator.is_, now, self._held))
            and all(now == before for now, before in self._metadata)
            and all(is_equal(now, before) for now, before in self._copies)
        )


def _pick(part: Part, left_out: Collection[Any], only: list[str] | None) -> list[Any]:
    """Returns names and what they hold, or only what some of them hold."""
    if only is not None:
        held = part.held
        return [held.get(name, ABSENT) for name in only]
    kept = [value for name, value in part.pairs if name not in left_out]
    # Numbers are the names in a list, and have no identity.
    return kept if part.kind is SEQUENCE else [*part.names, *kept]


def find_facts(walk: Walk, names: Collection[str] | None) -> dict[tuple[str, Any], Any]:
    """Returns all plain values that a walk found, by path and name."""
    root = 0 if names is None else id(walk.roots[0][0])
    facts: dict[tuple[str, Any], Any] = {
        (path, None): walk.fact(value) for value, path in walk.roots
    }
    for holder in walk.reached_from(names):
        for part in walk.nodes[holder].parts:
            path = walk.nodes[holder].path
            if part.kind.is_ordered:
                facts[path, _Order] = _Order(part.names)
            for name, value in part.pairs:
                is_other = holder == root and name not in (names or ())
                if is_other or (holder, name) in walk.globals or _nnx.is_internal(name):
                    continue
                place = part.kind.join(path, name)
                slot = walk.slots.get((id(part.source), name))
                if slot is None:
                    # A dictionary may have an attribute and an item of one name.
                    key = (name, part.kind) if (place, name) in facts else name
                    facts[place, key] = walk.fact(value)
                    continue
                facts[place, name] = Found(value, (slot.treedef, slot.is_dynamic), "")
                for leaf_path, leaf in slot.others:
                    facts[leaf_path, None] = walk.fact(leaf)
    return facts


class _Order(tuple[Any, ...]):
    """The names of items, in the order that the user made."""

    __slots__ = ()


def find_differences(
    old: Mapping[tuple[str, Any], Any],
    new: Mapping[tuple[str, Any], Any],
    fixed: Collection[int] = (),
) -> dict[str, str]:
    """Returns what differs between the facts of two walks, by path.

    Objects in `fixed`, by `id`, have none to stand in for them.
    """
    found = {}
    for key in {**old, **new}:
        before, now = old.get(key, ABSENT), new.get(key, ABSENT)
        if not _is_alike(before, now, fixed):
            found[key[0]] = _became(before, now)
    # What holds others says enough.
    return {p: text for p, text in found.items() if p.rpartition("/")[0] not in found}


def _is_alike(old: Any, new: Any, fixed: Collection[int]) -> bool:
    if isinstance(old, _Order) or isinstance(new, _Order):
        return old == new or old is ABSENT or new is ABSENT or set(old) != set(new)
    if isinstance(old, Found) and isinstance(new, Found):
        is_same = old.value is new.value or id(old.value) not in fixed
        return is_same and old[1:] == new[1:]
    return is_equal(old, new)


def _became(old: Any, new: Any) -> str:
    """Returns a sentence on what a place held and holds."""
    if isinstance(old, _Order):
        return "the order of its keys changed"
    old, new = (each.value if isinstance(each, Found) else each for each in (old, new))
    if old is ABSENT:
        return f"{describe(new)} was put there"
    if new is ABSENT:
        return f"{describe(old)} was removed"
    if describe(old) == describe(new):
        return f"{describe(old)} has changed"
    is_alike = type(old) is type(new) and type(old) in PLAIN
    return f"{describe(old)} became {repr(new)[:60] if is_alike else describe(new)}"
