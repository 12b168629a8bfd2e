"""Holds a state as one flat list of arrays, on the devices that a strategy uses.

A program may donate only arrays that come from our own programs, or that
`strategy.make` has made. All other arrays are copied first, so no array that a user has
made is deleted. Scalars are never donated.

This code runs for every array at every loop. In the usual case, no slot was touched.
Arrays are compared by identity to detect this case, in passes that Python makes in C.
"""

import contextlib
import itertools
import operator
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax

from armillary._planned import is_planning
from armillary.distribute._dispatch import uninterrupted
from armillary.distribute._new_arrays import is_new
from armillary.distribute._strategy import Strategy
from armillary.distribute.program._compare import check_same
from armillary.distribute.program._homes import Homes, copy_arrays, put
from armillary.errors import StateStructureError
from armillary.state._adapters import Adapter, adapter_of
from armillary.state._lift import State, as_array, check_has_values, strong
from armillary.state._slots import Slot, is_same_raw

_Picker: TypeAlias = Callable[[Sequence[Any]], Sequence[Any]]
_Parts: TypeAlias = tuple[Sequence[jax.Array], Sequence[jax.Array]]

_Place: TypeAlias = tuple[Slot, int, int]
"""A slot, and the range of its arrays in the state."""


class _Written(NamedTuple):
    """The variables of one library that a program changes.

    `numbers` and `indices` have the number of each variable's place, and the index of
    its array.
    """

    adapter: Adapter
    variables: list[Any]
    numbers: list[int]
    indices: list[int]


class _Use:
    """The arrays that one kind of program changes, and the arrays that it donates.

    Attributes:
        changed: The indices of the arrays that it changes.
        place_of: For each index in `changed`, its place there.
        donated: The indices of the arrays that it donates.
        others: The indices of all other arrays.
        pick_donated: Picks the donated arrays from a list of all arrays.
        pick_others: Picks the other arrays from such a list.
        pick_given: Picks all arrays from the new values of `changed`, followed by all
            old values.
    """

    def __init__(self, changed: tuple[int, ...], types: Sequence[Any]) -> None:
        num_changed = len(changed)
        num_arrays = len(types)
        self.changed = changed
        self.place_of = {index: number for number, index in enumerate(changed)}

        self.donated: list[int] = []
        scalars: list[int] = []
        for index in changed:
            is_scalar = types[index].ndim == 0
            if is_scalar:
                scalars.append(index)
            else:
                self.donated.append(index)
        read = [index for index in range(num_arrays) if index not in self.place_of]
        self.others = [*read, *scalars]
        self.pick_donated = _make_picker(self.donated)
        self.pick_others = _make_picker(self.others)

        # The new values come first, so an old value is `num_changed` places later.
        sources: list[int] = []
        for index in range(num_arrays):
            old_source = num_changed + index
            sources.append(self.place_of.get(index, old_source))
        self.pick_given = _make_picker(sources)


def _make_picker(indices: Sequence[int]) -> _Picker:
    """Returns a function that picks the values at some indices, in one pass in C."""
    if len(indices) > 1:
        return operator.itemgetter(*indices)
    return lambda values: [values[i] for i in indices]


class FlatState:
    """The arrays of a state, `lent` to programs, which `give` new ones back.

    Attributes:
        strategy: The strategy under which the programs run.
        split: The split of the state over devices, as the strategy has it.
        platform: The kind of the devices.
        signature: The signature of the state, which all its later forms must have.
        types: Shape and dtype of each array.
        arrays: The arrays, in the order of the state; `None` before the first program.
        state: The state that the arrays belong to.
        homes: Where the arrays lie, in a step and between programs.
    """

    def __init__(self, state: State, strategy: Strategy) -> None:
        self.strategy = strategy
        self.split = strategy.split
        self.platform: str = strategy.platform
        # A process that is alone has no other state to compare with.
        self._is_compared = strategy.peers.is_alone
        self._dispatch = strategy.dispatch

        if not is_planning():
            check_has_values(state)
        self.signature = state.signature()
        self.types = [
            jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
            for leaf in map(as_array, state.read())
        ]
        num_arrays = len(state.paths)
        self.arrays: list[Any] = [None] * num_arrays

        self.homes = Homes(state, strategy.placement)
        # No program has run yet, so none has changed an array.
        self._use = _Use((), self.types)
        # Whether `arrays` are newer than the slots.
        self._is_ahead = False
        # Whether `fits` has just looked at the slots.
        self._has_looked = False
        self._bind(state)
        # The values in the places, and the places whose values are not in `arrays`.
        self._held = self._read()
        self._stale = set(range(len(self._places)))
        _flat_states.add(self)

    def rebind(self, state: State) -> None:
        """Continues with the values that a new search for the same places has found."""
        # Watch now, and not at the next check, because NumPy arrays are mutable.
        state.watch()
        self._bind(state)

    def _bind(self, state: State) -> None:
        """Reads the places of a state, sorted so that one pass reads a library."""
        self.state = state
        # Variables of one array come first, because one pass reads all of a library.
        by_library: dict[Adapter, list[_Place]] = {}
        others: list[_Place] = []
        for place in state.ranges:
            slot, _, _ = place
            is_variable = slot.is_single_array and slot.variable is not None
            if is_variable:
                adapter = adapter_of(slot.variable)
                by_library.setdefault(adapter, []).append(place)
            else:
                others.append(place)

        leaf_places: list[_Place] = []
        self._variables: list[tuple[Adapter, list[Any]]] = []
        for adapter, places in by_library.items():
            leaf_places += places
            variables = [slot.variable for slot, _, _ in places]
            self._variables.append((adapter, variables))

        self._places = [*leaf_places, *others]
        # The index of the one array of each variable.
        self._leaves = [start for _, start, _ in leaf_places]
        self._has_looked = False
        self._find_written()

    def _find_written(self) -> None:
        """Finds the places that a program changes.

        The user may assign to all other places while the program runs.
        """
        place_of = self._use.place_of
        self._written: list[_Written] = []
        number = 0  # of the place, over all libraries
        for adapter, variables in self._variables:
            written = _Written(adapter, variables=[], numbers=[], indices=[])
            for variable in variables:
                index = self._leaves[number]
                if index in place_of:
                    written.variables.append(variable)
                    written.numbers.append(number)
                    written.indices.append(index)
                number += 1
            self._written.append(written)

        # A program may write only some arrays of a place.
        self._containers: list[tuple[int, list[int]]] = []
        num_variables = len(self._leaves)
        places = self._places[num_variables:]
        for number, (_, start, stop) in enumerate(places, start=num_variables):
            offsets = [i - start for i in range(start, stop) if i in place_of]
            if offsets:
                self._containers.append((number, offsets))

    def fits(self) -> bool:
        """Returns whether the slots hold arrays and structures of the same kinds."""
        self._look()
        self._has_looked = True  # for `settle`, which comes next
        try:
            arrays = [(i, as_array(leaf)) for i, leaf in self._stale_leaves()]
        except StateStructureError:
            return False
        for i, array in arrays:
            expected = self.types[i]
            if array.shape != expected.shape or array.dtype != expected.dtype:
                return False
        return not self.homes.has_moved_to_host(arrays)

    def serves(self, state: State) -> bool:
        """Returns whether programs for this state are also correct for another one."""
        is_alike = state.signature() == self.signature
        return is_alike and not self.homes.has_moved_to_host(enumerate(state.read()))

    @contextlib.contextmanager
    def lent(self, changed: tuple[int, ...]) -> Iterator[_Parts]:
        """Lends the arrays to a program, in a block that no signal interrupts."""
        taken = self.take(changed)
        # Before the block, so that Ctrl-C can end a long wait.
        self._dispatch.wait()
        with uninterrupted():
            yield taken

    def take(self, changed: tuple[int, ...]) -> _Parts:
        """Takes the arrays from the slots, and puts them on the program's devices."""
        self.settle(changed)
        use = self._use
        donated = use.pick_donated(self.arrays)
        others = use.pick_others(self.arrays)
        homes = self.homes
        if not homes.moves:
            return donated, others

        # Copies, because a move may share memory with the array that stays at home.
        copies = use.pick_donated(homes.is_moved)
        donated = put(donated, use.pick_donated(homes.of_program), copies)
        others = put(others, use.pick_others(homes.of_program))
        return donated, others

    def settle(self, changed: tuple[int, ...]) -> None:
        """Puts the arrays of the slots on their devices, ready for a program."""
        if self._use.changed != changed:
            self._begin_use(changed)
        moved = set() if self._is_ahead else self._refresh()
        moved |= self._separate()
        if moved:
            # Code between loops must find the arrays that the programs use. A NumPy
            # array must not stay in a slot, because identity cannot show a write to it.
            self.state.write(self.arrays, moved)
            self._held = self._read()

    def _begin_use(self, changed: tuple[int, ...]) -> None:
        """Prepares for another kind of program."""
        self.write_back()
        before = self._use
        self._use = _Use(changed, self.types)
        self._find_written()

        newly_donated = set(self._use.donated).difference(before.donated)
        for i in newly_donated:
            # A new trace may change an array that the last program only read, so it may
            # be the user's own.
            array = self.arrays[i]
            if array is not None:
                [self.arrays[i]] = copy_arrays([array])

    def join(
        self, changed: tuple[int, ...], donated: Sequence[Any], others: Sequence[Any]
    ) -> list[Any]:
        """Returns the arrays that `take` divided, in the order of the slots."""
        use = _Use(changed, self.types)
        order = [*use.donated, *use.others]
        arrays = [*donated, *others]
        by_index = dict(zip(order, arrays, strict=True))
        return [by_index[i] for i in range(len(order))]

    def types_to_take(self, changed: tuple[int, ...]) -> tuple[list[Any], list[Any]]:
        """Returns the result of `take` as shapes and shardings; nothing is placed."""
        types = [
            jax.ShapeDtypeStruct(kind.shape, kind.dtype, sharding=sharding)
            for kind, sharding in zip(self.types, self.homes.of_program, strict=True)
        ]
        use = _Use(changed, types)
        donated = use.pick_donated(types)
        others = use.pick_others(types)
        return list(donated), list(others)

    def owns(self, leaf: Any) -> bool:
        """Returns whether the next program may donate this array."""
        if not isinstance(leaf, jax.Array) or leaf.ndim == 0:
            return False
        return any(leaf is array for array in self.arrays)

    def give(self, values: Sequence[jax.Array], token: Any) -> None:
        """Takes the outputs of the program that the arrays were lent to."""
        homes = self.homes
        if homes.moves:
            values = put(values, [homes.between[i] for i in self._use.changed])
        self.arrays = list(self._use.pick_given([*values, *self.arrays]))
        self._is_ahead = True
        self._stale.clear()
        self._dispatch.started(token)

    def write_back(self) -> None:
        """Writes the outputs of the last program into the slots."""
        if not self._is_ahead:
            return
        held = list(self._held)
        for adapter, variables, numbers, indices in self._written:
            values = [self.arrays[i] for i in indices]
            for number, value in zip(numbers, values, strict=True):
                held[number] = value
            adapter.write(variables, values)
        for number, offsets in self._containers:
            slot, start, _ = self._places[number]
            leaves = {offset: self.arrays[start + offset] for offset in offsets}
            held[number] = slot.replace(held[number], leaves)
        self._held = held
        self._is_ahead = False

    @contextlib.contextmanager
    def writing_back(self) -> Iterator[None]:
        """Writes the arrays back into the slots at the end, even after an error."""
        try:
            yield
        finally:
            if self._is_ahead:
                with uninterrupted():
                    self.write_back()

    def forget(self, arrays: Collection[int]) -> None:
        """Lets go of the arrays with these identities, which places no longer have."""
        for number, (_, start, stop) in enumerate(self._places):
            for i in range(start, stop):
                if id(self.arrays[i]) in arrays:
                    self.arrays[i] = None
                    # No place holds `None`, so `_look` finds the place.
                    self._held[number] = None

    def _read(self) -> list[Any]:
        """Returns the values in all places, in their order."""
        values: list[Any] = []
        for adapter, variables in self._variables:
            values += adapter.read(variables)
        values += [slot.raw() for slot, _, _ in self._places[len(self._leaves) :]]
        return values

    def _look(self) -> None:
        """Finds the places whose values have changed since the last call."""
        before = self._held
        now = self._read()
        # In C, because it runs for every array at every loop.
        is_other = map(operator.is_not, now, before)
        others = itertools.compress(range(len(now)), is_other)
        self._stale.update(i for i in others if not is_same_raw(now[i], before[i]))
        self._held = now

    def _stale_leaves(self) -> Iterable[tuple[int, Any]]:
        """Yields the index and the value of each array that is not in `arrays`."""
        for slot, start, stop in map(self._places.__getitem__, self._stale):
            yield from zip(range(start, stop), slot.read(), strict=True)

    def _refresh(self) -> set[int]:
        """Places new values of slots on the devices.

        Returns:
            The indices of arrays that must be written back into their slots.
        """
        self._check_first_state()
        if not self._has_looked:
            self._look()
        self._has_looked = False

        stale = {i: x for i, x in self._stale_leaves() if x is not self.arrays[i]}
        donated = set(self._use.donated) if stale else set()
        values = [strong(value) for value in stale.values()]
        between = self.homes.between
        homes = [between[i] for i in stale]
        # A program may not donate an array of the user, only our copy of it.
        copies = [i in donated and not is_new(value) for i, value in stale.items()]
        placed = put(values, homes, copies)

        moved: set[int] = set()
        for (i, value), array in zip(stale.items(), placed, strict=True):
            self.arrays[i] = array
            # A program that changes an array writes its new value anyway.
            if array is not value and i not in self._use.place_of:
                moved.add(i)
        return moved

    def _check_first_state(self) -> None:
        """Raises if processes begin with different states, at the first program."""
        if self._is_compared:
            return
        self._is_compared = True

        # No process sees all of an array that processes share, so it is not compared.
        whole: dict[str, Any] = {}
        arrays = map(as_array, self.state.read())
        for path, array in zip(self.state.paths, arrays, strict=True):
            if array.is_fully_addressable:
                whole[path] = array
        check_same(self.strategy.peers, "state", whole)

    def _separate(self) -> set[int]:
        """Copies arrays that are in two slots, if one of these will be donated."""
        arrays = self.arrays
        use = self._use
        own = set(map(id, use.pick_donated(arrays)))
        has_twins = len(own) < len(use.donated)
        if has_twins:
            own.clear()
            for i in use.donated:
                if id(arrays[i]) in own:
                    [arrays[i]] = copy_arrays([arrays[i]])
                own.add(id(arrays[i]))

        if own.isdisjoint(map(id, use.pick_others(arrays))):
            return set()  # the usual case
        moved = {i for i in use.others if id(arrays[i]) in own}
        for i in moved:
            [arrays[i]] = copy_arrays([arrays[i]])
        return moved


_flat_states: "weakref.WeakSet[FlatState]" = weakref.WeakSet()


def forget_everywhere(arrays: Iterable[Any]) -> None:
    """Lets go of arrays that were replaced in their places, to free their memory.

    A flat state holds the arrays of the last program until the next program. Nothing
    may be running that has taken these arrays.
    """
    identities = set(map(id, arrays))
    for flat in _flat_states:
        flat.forget(identities)
