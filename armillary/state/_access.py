"""Reads and writes the places of a state all at once, and tells which were touched.

This happens at every loop, for every array, while the device may be waiting. So it is
made of passes that Python makes in C, and nothing is read that was just written.
"""

import itertools
import operator
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from armillary.state import _nnx
from armillary.state._lift import State
from armillary.state._slots import Slot, is_same_raw

Writer: TypeAlias = Callable[[Sequence[Any], Sequence[Any]], list[Any]]


class Access:
    """Fast access to the places of one state.

    What a place holds is taken as it is (`Slot.raw`): an array, or what tells whether
    a container was changed from within.

    Args:
        state: The places.

    Attributes:
        parts: For each place, in the order of `read`: its slot, and the range of its
            arrays in the flat list of the state.
    """

    def __init__(self, state: State) -> None:
        # NNX variables of one array come first: all of them are read in one go.
        is_array = [
            isinstance(slot, _nnx.NnxSlot) and slot.is_leaf for slot in state.slots
        ]
        self.parts: list[tuple[Slot, int, int]] = [
            *itertools.compress(state.ranges, is_array),
            *itertools.compress(state.ranges, map(operator.not_, is_array)),
        ]
        self._variables = [
            slot.variable
            for slot in itertools.compress(state.slots, is_array)
            if isinstance(slot, _nnx.NnxSlot)
        ]
        self._others = [slot for slot, _, _ in self.parts[len(self._variables) :]]

    def read(self) -> list[Any]:
        """Returns what each place holds, for `parts` in turn."""
        return [
            *_nnx.read_raw(self._variables),
            *[slot.raw() for slot in self._others],
        ]

    def find_changes(self, before: Sequence[Any], now: Sequence[Any]) -> list[int]:
        """Returns which of `parts` were touched between two calls of `read`."""
        is_other = map(operator.is_not, now, before)
        others = itertools.compress(range(len(now)), is_other)
        return [part for part in others if not is_same_raw(now[part], before[part])]

    def writer(self, only: Sequence[int]) -> Writer:
        """Returns a function that puts arrays into their places.

        Args:
            only: Indices of the arrays that it will get, in the flat list.

        Returns:
            A function of these arrays, and of what the places hold, which must be what
            `read` would return. It returns what they hold then.
        """
        position_of = {index: position for position, index in enumerate(only)}
        variables: list[Any] = []
        positions: list[int] = []
        # Where to find, in the given arrays followed by what the places hold, what
        # they will hold.
        sources = [len(only) + part for part in range(len(self.parts))]
        others: list[tuple[int, Slot, list[tuple[int, int]]]] = []
        for part, (slot, start, stop) in enumerate(self.parts):
            pairs = [
                (index - start, position_of[index])
                for index in range(start, stop)
                if index in position_of
            ]
            if pairs and part < len(self._variables):
                variables.append(self._variables[part])
                positions.append(pairs[0][1])
                sources[part] = pairs[0][1]
            elif pairs:
                others.append((part, slot, pairs))
        pick, pick_held = make_picker(positions), make_picker(sources)

        def write(leaves: Sequence[Any], held: Sequence[Any]) -> list[Any]:
            _nnx.write_raw(variables, pick(leaves))
            now = pick_held([*leaves, *held])
            for part, slot, pairs in others:
                values = {offset: leaves[position] for offset, position in pairs}
                now[part] = slot.replace(held[part], values)
            return now

        return write


def make_picker(positions: Sequence[int]) -> Callable[[Sequence[Any]], list[Any]]:
    """Returns a function that picks the values at some positions, in one pass in C."""
    if len(positions) < 2:
        return lambda values: [values[position] for position in positions]
    pick = operator.itemgetter(*positions)
    return lambda values: list(pick(values))
