"""Notices, between two loops, that the user's objects hold something new.

A walk takes long, and hardly ever finds anything that the last one did not. So what
every holder held is remembered, and compared by identity, in passes that Python makes
in C. Only holders that a step may have looked at matter, and those that lead to state.

Tells two walks apart: what would make a step do something else.

Two walks are alike if they go over objects of the same types, connected in the same
way, with equal plain values. That they are other objects does not matter: a program
knows none. So a metric that is made anew for every loop changes nothing, and a number
anywhere in a nest of containers does.
"""

import collections
import functools
import itertools
import operator
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

from armillary.state import _nnx
from armillary.state._holders import (
    ABSENT,
    Metadata,
    Numbers,
    Part,
    Sequence,
    are_plain,
)
from armillary.state._opaque import PLAIN, is_equal, is_same_array
from armillary.state._place import PlaceSlot
from armillary.state._slots import describe
from armillary.state._walk import Node, Walk

_Pair = tuple[Any, Any, str]


def compare(
    old: Walk,
    new: Walk,
    names: Collection[str] | None = None,
    fixed: Collection[int] = (),
    but: Collection[tuple[int, Any]] = (),
) -> dict[str, str]:
    """Returns what differs between two walks from the same roots, by path.

    Arrays in slots, and what the places `but` hold, are none of its business.
    """
    return dict(_Comparison(old, new, names, fixed, but).differences())


class _Comparison:
    def __init__(
        self,
        old: Walk,
        new: Walk,
        names: Collection[str] | None,
        fixed: Collection[int],
        but: Collection[tuple[int, Any]],
    ) -> None:
        self._old, self._new = old, new
        self._names, self._fixed, self._but = names, fixed, but
        self._root = id(old.roots[0][0]) if old.roots else None
        # Which holder stands in for which, both ways.
        self._new_of: dict[int, int] = {}
        self._old_of: dict[int, int] = {}
        self._pending: list[_Pair] = [
            (a, b, path) for (a, path), (b, _) in zip(old.roots, new.roots, strict=True)
        ]

    def differences(self) -> Iterator[tuple[str, str]]:
        """Yields paths and what differs there."""
        while self._pending:
            a, b, path = self._pending.pop()
            old, new = self._old.nodes.get(id(a)), self._new.nodes.get(id(b))
            if old is None or new is None:
                if not is_equal(a, b):
                    yield path, became(a, b)
            elif self._stands_in(a, b):
                yield from self._compare_nodes(old, new, path)
            elif self._new_of.get(id(a)) != id(b):
                yield path, became(a, b)

    def _stands_in(self, a: Any, b: Any) -> bool:
        """Notes that `b` stands in for `a`; returns whether that is new and may be."""
        if id(a) in self._new_of or id(b) in self._old_of or type(a) is not type(b):
            return False
        if a is not b and id(a) in self._fixed:
            return False
        self._new_of[id(a)], self._old_of[id(b)] = id(b), id(a)
        return True

    def _compare_nodes(
        self, old: Node, new: Node, path: str
    ) -> Iterator[tuple[str, str]]:
        for a, b in zip(old.parts, new.parts, strict=True):
            if isinstance(a, Numbers):
                kept = a.source if a.copy is None else a.copy
                if kept is not b.source and not is_same_array(kept, b.source):
                    yield path, "its numbers changed"
            elif id(old.value) == self._root and self._names is not None:
                yield from self._compare_parts(a, b, path, sorted(self._names))
            elif not (_is_same(a, b) and are_plain(a.values)):
                names = dict.fromkeys([*a.names, *b.names])
                yield from self._compare_parts(a, b, path, names)
                if a.is_ordered and a.names != b.names and len(a.names) == len(b.names):
                    yield path, "the order of its keys changed"

    def _compare_parts(
        self, a: Part, b: Part, path: str, names: Collection[Any]
    ) -> Iterator[tuple[str, str]]:
        before, now = a.held, b.held
        below: list[_Pair] = []
        for name in names:
            was, is_now = before.get(name, ABSENT), now.get(name, ABSENT)
            if was is is_now and (type(was) in PLAIN or was is ABSENT):
                continue
            if _nnx.is_internal(name) or (id(a.source), name) in self._but:
                continue
            place = a.path(path, name)
            old = self._old.slots.get((id(a.source), name))
            new = self._new.slots.get((id(b.source), name))
            if isinstance(old, PlaceSlot) and isinstance(new, PlaceSlot):
                yield from self._compare_slots(old, new, place)
            elif (old is None) != (new is None) or was is ABSENT or is_now is ABSENT:
                yield place, became(was, is_now)
            else:
                below.append((was, is_now, place))
        self._pending += reversed(below)  # the first name of an object is its name

    def _compare_slots(
        self, old: PlaceSlot, new: PlaceSlot, path: str
    ) -> Iterator[tuple[str, str]]:
        if old.treedef != new.treedef or old.is_dynamic != new.is_dynamic:
            yield path, f"tree structure {old.treedef} became {new.treedef}"
            return
        for leaf_path, a, b in zip(old.leaf_paths, old.static, new.static, strict=True):
            if a is not b or type(a) not in PLAIN:
                self._pending.append((a, b, leaf_path))


def became(old: Any, new: Any) -> str:
    """Returns a sentence on what a place held and holds."""
    if old is ABSENT:
        return f"{describe(new)} was put there"
    if new is ABSENT:
        return f"{describe(old)} was removed"
    is_alike = type(old) is type(new) and type(old) in PLAIN
    return f"{describe(old)} became {repr(new)[:60] if is_alike else describe(new)}"


def _is_same(a: Part, b: Part) -> bool:
    """Returns whether two parts hold the same objects under the same names."""
    return a.names == b.names and all(map(operator.is_, a.values, b.values))


_END = object()


class Watch:
    """Watches the holders that a walk found, except for their slots.

    Of the first root, the attributes of these names matter; `None` stands for all. The
    places `but` may hold anything.
    """

    def __init__(
        self,
        walk: Walk,
        names: Collection[str] | None,
        but: Collection[tuple[int, Any]],
    ) -> None:
        reached, leading = walk.reached_from(names, but), walk.leading_to_slots()
        root = 0 if names is None else id(walk.roots[0][0])
        slots: dict[int, set[Any]] = collections.defaultdict(set)
        for key in (*walk.slots, *but):
            if isinstance(key, tuple):
                slots[key[0]].add(key[1])
        # Live views of what parts without slots hold, and what they held.
        self._views: list[Iterable[Any]] = []
        held: list[Any] = []
        # What looks at the other parts, and what it saw.
        self._rest: list[Callable[[], list[Any]]] = []
        rest: list[Any] = []
        self._numbers: list[Numbers] = []
        metadata: list[Metadata] = []
        for holder in reached | leading:
            for part in walk.nodes[holder].parts:
                without = slots.get(id(part.source), ())
                if holder == root:
                    leads = {n for n, child in walk.edges[root] if child in leading}
                    only = {*leads, *(names or ())}.difference(without)
                    self._rest.append(functools.partial(_look_at, part, sorted(only)))
                    rest += [part.held.get(name, ABSENT) for name in sorted(only)]
                elif isinstance(part, Numbers):
                    part.keep(is_read=names is not None)
                    self._numbers.append(part)
                elif isinstance(part, Metadata):
                    metadata.append(part)
                elif without or not part.has_views:
                    self._rest.append(functools.partial(_look, part, without))
                    rest += _pick(part, without, part.names, part.values)
                else:
                    for live, found in part.views():
                        self._views.append(live)
                        held += found
        self._held = [*held, *rest, _END]
        self._metadata = [part.source for part in metadata]
        self._held_metadata = [part.held for part in metadata]

    def is_current(self) -> bool:
        """Returns whether the holders hold what they held at first."""
        return (
            all(map(operator.is_, self._hold(), self._held))
            and self._metadata == self._held_metadata
            and all(part.is_as_found() for part in self._numbers)
        )

    def _hold(self) -> Iterator[Any]:
        """Yields what is held, and then `_END`, which no value before it is."""
        return itertools.chain(
            itertools.chain.from_iterable(self._views),
            itertools.chain.from_iterable(look() for look in self._rest),
            (_END,),
        )


def _look(part: Part, without: Collection[Any]) -> list[Any]:
    return _pick(part, without, *part.look())


def _pick(
    part: Part, without: Collection[Any], names: list[Any], values: list[Any]
) -> list[Any]:
    """Returns names and what they hold, but for slots."""
    held = zip(names, values, strict=True)
    kept = [value for name, value in held if name not in without]
    # Numbers are the names in a list, and have no identity.
    return kept if isinstance(part, Sequence) else [*names, *kept]


def _look_at(part: Part, names: list[Any]) -> list[Any]:
    return list(map(part.get, names))
