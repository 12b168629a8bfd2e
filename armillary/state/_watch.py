"""Notices, between two loops, that the user's objects hold something new.

A walk takes long, and hardly ever finds anything that the last one did not. So what
every holder held is remembered, and compared by identity, in passes that Python makes
in C. Only holders that a step may have looked at matter, and those that lead to state.
"""

import collections
import functools
import itertools
import operator
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

from armillary.state._holders import ABSENT, Metadata, Numbers, Part, Sequence
from armillary.state._walk import Walk

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
