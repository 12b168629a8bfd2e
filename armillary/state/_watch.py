"""Notices, between two loops, that the user's objects hold something new.

A search takes long, and hardly ever finds anything that the last one did not. So what
every searched object held is remembered, and compared by identity.
"""

import itertools
import operator
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

from armillary.state._find import held_by, is_function, slot_names
from armillary.state._slots import join

_END = object()


class Watch:
    """Watches the objects that a search went through, except for their slots.

    Args:
        holders: The objects, functions and containers, with their paths.
        places: The keys of slots; arrays in them are replaced by every step.
    """

    def __init__(
        self, holders: Sequence[tuple[Any, str]], places: Collection[Any]
    ) -> None:
        self._holders: list[tuple[Any, str, set[Any]]] = []
        # Views of the attributes and items of objects without slots: Python compares
        # them in C, whatever their number.
        self._views: list[Iterable[Any]] = []
        self._rest: list[tuple[Any, set[Any]]] = []
        for holder, path in holders:
            slots = {
                name for name, _ in held_by(holder) if (id(holder), name) in places
            }
            self._holders.append((holder, path, slots))
            view = None if slots else _view(holder)
            if view is None:
                self._rest.append((holder, slots))
            else:
                self._views.append(view)
        self._held = list(self._hold())
        self._held_by_place = self._hold_by_place()

    def is_current(self) -> bool:
        """Returns whether the objects hold what they held at first."""
        return all(map(operator.is_, self._hold(), self._held))

    def changes_since(self, old: "Watch") -> set[str]:
        """Returns the paths of what differs from what `old` held, or is gone."""
        before, now = old._held_by_place, self._held_by_place
        changed = {
            path
            for place, (path, value) in now.items()
            if place not in before or not _is_equal(before[place][1], value)
        }
        gone = before.keys() - now.keys()
        return changed.union(before[place][0] for place in gone)

    def held_at(self, place: Any, default: Any) -> Any:
        """Returns what a place that is no slot held at first, `default` for nothing."""
        return self._held_by_place.get(place, (None, default))[1]

    def _hold(self) -> Iterator[Any]:
        """Yields what is held, and then `_END`, which no value before it is."""
        rest = [
            value
            for holder, slots in self._rest
            for name, value in held_by(holder)
            if name not in slots
        ]
        return itertools.chain(
            itertools.chain.from_iterable(self._views), rest, (_END,)
        )

    def _hold_by_place(self) -> dict[tuple[int, Any], tuple[str, Any]]:
        return {
            (id(holder), name): (join(path, name), value)
            for holder, path, slots in self._holders
            for name, value in held_by(holder)
            if name not in slots
        }


def _view(holder: Any) -> Iterable[Any] | None:
    """Returns a live view of what an object or container holds, if it has one."""
    if isinstance(holder, list):
        return holder
    if isinstance(holder, dict):
        return holder.values()
    if is_function(holder) or slot_names(type(holder)):
        return None
    return vars(holder).values()


def _is_equal(a: Any, b: Any) -> bool:
    """Returns whether two held values make no difference to a program."""
    is_plain = isinstance(a, str | int | float) and type(a) is type(b)
    return a is b or (is_plain and a == b)
