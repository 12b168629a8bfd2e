"""Finds out whether a new walk would find the same objects and plain values.

A walk takes long, and hardly ever finds anything new. So `Watch` compares by identity
the values that the holders held with the values that they hold now, in passes that
Python makes in C. It watches the holders that a step may have read, and the holders
that lead to state.
"""

import collections
import itertools
import operator
from collections.abc import Collection, Iterable
from typing import Any, NamedTuple

from armillary.state._adapters import node_adapter
from armillary.state._code import Code
from armillary.state._differences import Facts, find_facts
from armillary.state._holders import (
    ATTRIBUTES,
    FUNCTION_TYPES,
    ITEMS,
    METADATA,
    SEQUENCE,
    is_unchanging,
    part_of,
)
from armillary.state._parts import Part
from armillary.state._slots import ABSENT, is_equal
from armillary.state._walk import Node, Walk

_END = object()


class _Look(NamedTuple):
    """A part to look at again with Python code.

    It is about the names in `only`, or about all names except `left_out`.
    """

    part: Part
    left_out: Collection[Any]
    only: list[str] | None


class Watch:
    """Watches the holders that a walk found, except for slots and constants.

    Only the attributes in `names` of the first root count; `None` stands for all.
    """

    def __init__(
        self,
        walk: Walk,
        names: Collection[str] | None,
        *,
        copies_large: bool | None = None,
    ) -> None:
        leading = walk.leading_to_slots
        watched = walk.reached_from(names) | leading
        # No object has the `id` 0, so without names no holder is special.
        root = 0 if names is None else id(walk.first_root)
        # The names of slots and constants, by the `id` of their place.
        without: dict[int, set[Any]] = collections.defaultdict(set)
        for source, names_of_slots in walk.names_of_slots.items():
            without[source] |= names_of_slots
        for source, name in walk.globals:
            without[source].add(name)

        self._views: list[Iterable[Any]] = []  # containers, to iterate over in C
        self._looks: list[_Look] = []
        self._metadata: list[tuple[Any, Any]] = []
        # The contents of the views, then of the looks.
        self._held: list[Any] = []
        for holder in watched:
            node = walk.nodes[holder]
            for part in node.parts:
                left_out = without.get(id(part.source), ())
                if holder == root:
                    # New attributes that no step has read do not count.
                    edges = walk.edges[root]
                    to_state = {name for name, child in edges if child in leading}
                    wanted = to_state.union(names or ()).difference(left_out)
                    self._looks.append(_Look(part, (), sorted(wanted)))
                else:
                    self._add(node, part, left_out)
        for look in self._looks:
            self._held += _pick(*look)
        self._held.append(_END)

        if copies_large is None:
            copies_large = names is not None
        self._copies = walk.copy(watched, is_read=copies_large)

    def _add(self, node: Node, part: Part, left_out: Collection[Any]) -> None:
        """Watches a part of a holder, in the cheapest way that is safe for it."""
        if is_unchanging(part):
            return  # Its contents are watched on their own.
        if part.way is METADATA:
            self._metadata.append((part.source, part.held))
            return
        if left_out or part.way not in (ITEMS, ATTRIBUTES, SEQUENCE):
            self._looks.append(_Look(part, left_out, only=None))
            return
        if part.way is SEQUENCE:
            self._views.append(part.source)
            self._held += part.values
            return
        adapter = node_adapter(type(node.value))
        # A name may change while its value stays. Some libraries keep the names in an
        # attribute, which is among the values.
        are_names_recorded = adapter is not None and adapter.records_names
        if not are_names_recorded:
            self._views.append(part.source)
            self._held += part.names
        self._views.append(part.source.values())
        self._held += part.values

    def is_current(self) -> bool:
        """Returns whether the holders still hold the same names and values."""
        looks = (
            _pick(part_of(part.source, part.way), left_out, only)
            for part, left_out, only in self._looks
        )
        # `_END` comes last and is unique, so a shorter or longer list is a difference.
        now = itertools.chain.from_iterable([*self._views, *looks, (_END,)])
        return (
            all(map(operator.is_, now, self._held))
            and all(now == before for now, before in self._metadata)
            and all(is_equal(now, before) for now, before in self._copies)
        )


class CodeWatch:
    """Watches the values that code reads by name, unless they lead to state.

    It looks at the code of `functions`, of the functions that a walk found, and of the
    classes of the objects that it found.
    """

    def __init__(
        self,
        walk: Walk,
        names: Collection[str] | None,
        functions: Collection[Any],
    ) -> None:
        objects = [walk.nodes[key].value for key in walk.reached_from(names)]
        found = [held for held in objects if issubclass(type(held), FUNCTION_TYPES)]
        code = Code([*functions, *found], objects)
        self._lookups = list(code.lookups.values())
        values = [
            (value, path)
            for value, path in code.values()
            if id(value) not in walk.leading_to_slots
        ]
        self._walk = Walk(values, finds_slots=False)
        self._watch = Watch(self._walk, None, copies_large=True)

    def is_current(self) -> bool:
        """Returns whether the names still stand for the same, unchanged values."""
        is_same = all(lookup.read() is lookup.value for lookup in self._lookups)
        return is_same and self._watch.is_current()

    def facts(self) -> Facts:
        """Returns the values that the names stood for, by path."""
        facts = find_facts(self._walk, None)
        for lookup in self._lookups:
            key = (lookup.path, None)
            facts.setdefault(key, self._walk.fact(lookup.value))
        return facts


def _pick(part: Part, left_out: Collection[Any], only: list[str] | None) -> list[Any]:
    """Returns the names and values of a part, or the values of the names in `only`."""
    if only is not None:
        held = part.held
        return [held.get(name, ABSENT) for name in only]
    kept = [value for name, value in part.pairs if name not in left_out]
    # The names in a list are its indices, and numbers have no identity.
    return kept if part.way is SEQUENCE else [*part.names, *kept]
