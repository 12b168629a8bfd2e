"""Which arrays of a state one kind of program changes, and where they come from.

All of it is indices, found once, so that handing hundreds of arrays to a program and
putting them back are a few passes that Python makes in C.
"""

import operator
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, TypeGuard

from armillary.state._nnx import NnxSlot
from armillary.state._slots import Slot

Place: TypeAlias = tuple[Slot, int, int]
"""A slot, and the range of its arrays in the flat list."""


class Use:
    """How one kind of program uses the arrays, as indices.

    Args:
        changed: Indices of the arrays that it changes.
        types: Shape and dtype of all arrays.
        places: The places that hold them.

    Attributes:
        changed: As given.
        changes: As `changed`, to look up an index.
        donated: Indices of those that it takes over.
        others: Indices of the others.
        pick_donated: Picks those of `donated`, among all.
        pick_others: Picks those of `others`, among all.
        pick_given: Picks all, among those of `changed` followed by all of before.
        variables: The NNX variables of one array that it changes.
        pick_values: Picks what they are to hold, among all.
        containers: The other places that it changes: their numbers, their slots, and
            which of their arrays are which among all.
    """

    def __init__(
        self, changed: tuple[int, ...], types: Sequence[Any], places: Sequence[Place]
    ) -> None:
        self.changed = changed
        donated, self.others = divide(changed, types)
        self.pick_donated = make_picker(donated)
        self.pick_others = make_picker(self.others)
        self.donated, self.changes = frozenset(donated), frozenset(changed)
        given = range(len(changed), len(changed) + len(types))
        new = dict(zip(changed, range(len(changed)), strict=True))
        self.pick_given = make_picker([new.get(i, old) for i, old in enumerate(given)])
        self.variables: list[Any] = []
        self.containers: list[tuple[int, Slot, list[tuple[int, int]]]] = []
        indices: list[int] = []
        for place, (slot, start, stop) in enumerate(places):
            offsets = [(i - start, i) for i in range(start, stop) if i in new]
            if offsets and is_leaf(slot):
                self.variables.append(slot.variable)
                indices.append(start)
            elif offsets:
                self.containers.append((place, slot, offsets))
        self.pick_values = make_picker(indices)


def divide(changed: Sequence[int], types: Sequence[Any]) -> tuple[list[int], list[int]]:
    """Returns the indices of arrays that are donated, and of the others."""
    donated = [i for i in changed if types[i].ndim]
    changes = set(changed)
    read = [i for i in range(len(types)) if i not in changes]
    return donated, [*read, *[i for i in changed if not types[i].ndim]]


def make_picker(indices: Sequence[int]) -> Callable[[Sequence[Any]], Sequence[Any]]:
    """Returns a function that picks the values at some indices, in one pass in C."""
    if len(indices) > 1:
        return operator.itemgetter(*indices)
    return lambda values: [values[i] for i in indices]


def is_leaf(slot: Slot) -> TypeGuard[NnxSlot]:
    """Returns whether a slot is an NNX variable that holds one array."""
    return isinstance(slot, NnxSlot) and slot.is_leaf
