"""Notices, between two loops, that the user's objects hold something new.

A walk takes long, and hardly ever finds anything that the last one did not. So what
every holder held is remembered, and compared by identity, in passes that Python makes
in C. Only holders that a step may have looked at matter, and those that lead to state.
"""

import itertools
import operator
from collections.abc import Collection, Iterable, Iterator
from typing import Any

from armillary.state._holders import ABSENT, Numbers, Part
from armillary.state._walk import Walk

_END = object()


class Watch:
    """Watches the holders that a walk found, except for their slots.

    Args:
        walk: The walk.
        names: The attributes of the first root that matter; `None` for all.
    """

    def __init__(self, walk: Walk, names: Collection[str] | None) -> None:
        slots: dict[int, set[Any]] = {}
        for key in walk.slots:
            if isinstance(key, tuple):
                slots.setdefault(key[0], set()).add(key[1])
        reached, leading = walk.reached_from(names), walk.leading_to_slots()
        root = id(walk.roots[0][0]) if names is not None else None
        # Live views of what parts without slots hold.
        self._views: list[Iterable[Any]] = []
        self._rest: list[tuple[Part, Collection[Any] | None, Collection[Any]]] = []
        self._numbers: list[Numbers] = []
        held: list[Any] = []
        for node in (walk.nodes[holder] for holder in walk.nodes):
            if id(node.value) not in reached and id(node.value) not in leading:
                continue
            for part in node.parts:
                views = part.views()
                without = slots.get(id(part.source), ())
                if id(node.value) == root:
                    only = {n for n, child in walk.edges[root] if child in leading}
                    self._rest.append((part, sorted(only.union(names or ())), without))
                elif isinstance(part, Numbers):
                    part.keep()
                    self._numbers.append(part)
                elif without or views is None:
                    self._rest.append((part, None, without))
                else:
                    views = list(views)
                    self._views += views
                    held += part.names if len(views) == 2 else ()
                    held += part.values if views else ()
        rest = [
            value
            for part, only, without in self._rest
            for value in _pick(part.names, part.values, only, without)
        ]
        self._held = [*held, *rest, _END]

    def is_current(self) -> bool:
        """Returns whether the holders hold what they held at first."""
        return all(map(operator.is_, self._hold(), self._held)) and all(
            part.is_as_found() for part in self._numbers
        )

    def _hold(self) -> Iterator[Any]:
        """Yields what is held, and then `_END`, which no value before it is."""
        rest = [
            value
            for part, only, without in self._rest
            for value in _pick(*part.look(), only, without)
        ]
        return itertools.chain(
            itertools.chain.from_iterable(self._views), rest, (_END,)
        )


def _pick(
    names: list[Any],
    values: list[Any],
    only: Collection[Any] | None,
    without: Collection[Any],
) -> Iterator[Any]:
    """Yields the names and values of a part that count."""
    if only is not None:
        held = dict(zip(names, values, strict=True))
        yield from (held.get(n, ABSENT) for n in only if n not in without)
        return
    for name, value in zip(names, values, strict=True):
        if isinstance(name, str):  # numbers have no identity
            yield name
        if name not in without:
            yield value
