"""Holds a state as one flat list of arrays, where a strategy wants them.

A program may take over (donate) only buffers that nobody else holds. Arrays that come
from our own programs are such; any other array was put into its slot by the user, a
checkpoint or an initializer, and is copied first, so nothing a user holds is deleted.
Scalars (counters, sums of metrics) are never donated: a copy costs more than they do.
Where state lives in one place and programs run in others, programs take over copies,
and what they make of them is moved back.

The arrays are at home, in the slots, or ahead of them: `give` takes what a program has
made of them, `write_back` brings it home, and `settle` makes them ready for the next
program, with what was put into the slots meanwhile. This runs at every loop, over every
array of the state, while the device may be waiting. So the usual case, in which nobody
touched a slot since the last program, is told by identity, in passes that Python makes
in C; all else is done slot by slot.
"""

import contextlib
import functools
import itertools
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias, TypeGuard

import jax

from armillary.distribute._dispatch import uninterrupted
from armillary.distribute._global_arrays import as_global
from armillary.distribute._strategy import Strategy
from armillary.distribute.program._compare import check_same_state
from armillary.errors import StateStructureError
from armillary.state import _nnx
from armillary.state._lift import State, as_array, strong
from armillary.state._nnx import NnxSlot
from armillary.state._slots import Slot, is_same_raw

_Picker: TypeAlias = Callable[[Sequence[Any]], Sequence[Any]]
_Parts: TypeAlias = tuple[Sequence[jax.Array], Sequence[jax.Array]]
Place: TypeAlias = tuple[Slot, int, int]
"""A slot, and the range of its arrays in the flat list."""


class _Use(NamedTuple):
    """How one kind of program uses the arrays: which it changes, and takes over."""

    changed: tuple[int, ...]
    donated: list[int]
    others: list[int]
    pick_donated: _Picker
    pick_others: _Picker
    pick_given: _Picker  # all, among those of `changed` followed by all of before
    # The NNX variables of one array that it changes, and what they are to hold.
    variables: list[Any]
    pick_values: _Picker
    # The other places that it changes: their numbers, their slots, and which of their
    # arrays are which among all.
    containers: list[tuple[int, Slot, list[tuple[int, int]]]]


def _find_use(
    changed: tuple[int, ...], types: Sequence[Any], places: Sequence[Place]
) -> _Use:
    donated, others = _divide(changed, types)
    new = {index: number for number, index in enumerate(changed)}
    given = [new.get(i, len(changed) + i) for i in range(len(types))]
    variables, indices, containers = [], [], []
    for number, (slot, start, stop) in enumerate(places):
        offsets = [(i - start, i) for i in range(start, stop) if i in new]
        if offsets and _is_leaf(slot):
            variables.append(slot.variable)
            indices.append(start)
        elif offsets:
            containers.append((number, slot, offsets))
    return _Use(
        changed,
        donated,
        others,
        make_picker(donated),
        make_picker(others),
        make_picker(given),
        variables,
        make_picker(indices),
        containers,
    )


def _divide(
    changed: Sequence[int], types: Sequence[Any]
) -> tuple[list[int], list[int]]:
    """Returns the indices of arrays that are donated, and of the others."""
    donated = [i for i in changed if types[i].ndim]
    changes = set(changed)
    read = [i for i in range(len(types)) if i not in changes]
    return donated, [*read, *[i for i in changed if not types[i].ndim]]


def make_picker(indices: Sequence[int]) -> _Picker:
    """Returns a function that picks the values at some indices, in one pass in C."""
    if len(indices) > 1:
        return operator.itemgetter(*indices)
    return lambda values: [values[i] for i in indices]


def _is_leaf(slot: Slot) -> TypeGuard[NnxSlot]:
    """Returns whether a slot is an NNX variable that holds one array."""
    return isinstance(slot, NnxSlot) and slot.is_leaf


class FlatState:
    """The arrays of a state, for one program after another.

    In outline::

        with flat.lent(changed) as (donated, others):
            values, token = program(donated, others)
            flat.give(values, token)
        flat.write_back()

    What is lent is what the slots hold, on its devices. Where no code of the user runs
    between two programs, nothing need be written back there. Until it is (`is_ahead`),
    the slots hold arrays that are gone. `arrays` stay good until the next program runs.
    """

    def __init__(self, state: State, strategy: Strategy) -> None:
        self._peers, self._dispatch = strategy.peers, strategy.dispatch
        self.strategy, self.split = strategy, strategy.split
        self.platform: str = strategy.platform
        self.signature = state.signature()
        self.types = [
            jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
            for leaf in map(as_array, state.read())
        ]
        self._shardings = list(strategy.state_shardings(state))
        home = strategy.home
        self._homes = [home or sharding for sharding in self._shardings]
        self._moves = self._homes != self._shardings
        self.arrays: list[Any] = [None] * len(state.paths)
        self.is_ahead = False
        self._bind(state, ())
        # What each place holds, and which places hold something else than `arrays`.
        self._held = self._read()
        self._stale = set(range(len(self._places)))
        # Whether an array that is donated may stand in another place too.
        self._may_share = True

    def rebind(self, state: State) -> None:
        """Goes on with what a new search for the same places has found."""
        # Now, and not when it is next asked: NumPy arrays can be written into.
        state.watch()
        self._bind(state, self._use.changed)

    def _bind(self, state: State, changed: tuple[int, ...]) -> None:
        self.state = state
        # NNX variables of one array come first: all of them are read in one go.
        self._places = sorted(state.ranges, key=lambda place: not _is_leaf(place[0]))
        leaves = [(slot, i) for slot, i, _ in self._places if _is_leaf(slot)]
        self._variables = [slot.variable for slot, _ in leaves]
        self._pick_variables = make_picker([i for _, i in leaves])
        self._use = _find_use(changed, self.types, self._places)
        self._has_looked = False

    def fits(self) -> bool:
        """Returns whether the slots hold arrays and structures as were found."""
        self._look()
        try:
            leaves = [pair for place in self._stale for pair in self._leaves(place)]
        except StateStructureError:
            return False
        pairs = [(self.types[i], as_array(leaf)) for i, leaf in leaves]
        return all(
            (array.shape, array.dtype) == (kind.shape, kind.dtype)
            for kind, array in pairs
        )

    @contextlib.contextmanager
    def lent(self, changed: tuple[int, ...]) -> Iterator[_Parts]:
        """Lends the arrays to a program, in a moment that no signal cuts short."""
        taken = self.take(changed)
        self._dispatch.wait()
        with uninterrupted():
            yield taken

    def take(self, changed: tuple[int, ...]) -> _Parts:
        """Takes what the slots hold, and puts it on its devices."""
        self.settle(changed)
        use = self._use
        donated, others = use.pick_donated(self.arrays), use.pick_others(self.arrays)
        if not self._moves:
            return donated, others
        move = functools.partial(_put, may_alias=False)
        return (
            list(map(move, donated, use.pick_donated(self._shardings))),
            list(map(_put, others, use.pick_others(self._shardings))),
        )

    def settle(self, changed: tuple[int, ...]) -> None:
        """Puts what the slots hold where it lives, ready for a program."""
        if self._use.changed != changed:
            self.write_back()
            self._change_use(changed)
        moved: set[int] = set()
        if not self.is_ahead:
            self._check_peers()
            if not self._has_looked:
                self._look()
            self._has_looked = False
            moved |= self._refresh()
        if self._may_share:
            moved |= self._separate()
        self._may_share = True
        if moved:
            # Code between loops must find them where the programs have them. And that
            # somebody writes into a NumPy array, identity would not tell.
            self.state.write(self.arrays, moved)
            self._held = self._read()

    def join(
        self, changed: tuple[int, ...], donated: Sequence[Any], others: Sequence[Any]
    ) -> list[Any]:
        """Returns the arrays that `take` divided, in the order of the slots."""
        order = [i for part in _divide(changed, self.types) for i in part]
        arrays = dict(zip(order, [*donated, *others], strict=True))
        return [arrays[i] for i in range(len(order))]

    def shardings(self, indices: Sequence[int]) -> list[Any]:
        """Returns where programs have the arrays of `indices`; `None` for anywhere."""
        return [self._shardings[i] for i in indices]

    def describe(self, changed: tuple[int, ...]) -> tuple[list[Any], list[Any]]:
        """Returns what `take` would, as shapes and shardings; nothing is placed."""
        types = [
            jax.ShapeDtypeStruct(kind.shape, kind.dtype, sharding=sharding)
            for kind, sharding in zip(self.types, self._shardings, strict=True)
        ]
        donated, others = _divide(changed, types)
        return [types[i] for i in donated], [types[i] for i in others]

    def owns(self, leaf: Any) -> bool:
        """Returns whether the next program may take this array over."""
        if not isinstance(leaf, jax.Array) or leaf.ndim == 0:
            return False
        return any(leaf is array for array in self.arrays)

    def give(
        self, values: Sequence[jax.Array], token: Any, *, may_share: bool = True
    ) -> None:
        """Takes over the outputs of the program that the arrays were lent to."""
        if self._moves:
            homes = [self._homes[i] for i in self._use.changed]
            values = list(map(_put, values, homes))
        self.arrays = list(self._use.pick_given([*values, *self.arrays]))
        self._may_share = may_share
        self.is_ahead = True
        self._stale.clear()
        self._dispatch.started(token)

    def write_back(self) -> None:
        """Writes the outputs of the last program into the slots."""
        if not self.is_ahead:
            return
        use, arrays = self._use, self.arrays
        _nnx.write_raw(use.variables, use.pick_values(arrays))
        held = [*self._pick_variables(arrays), *self._held[len(self._variables) :]]
        for place, slot, offsets in use.containers:
            values = {offset: arrays[i] for offset, i in offsets}
            held[place] = slot.replace(self._held[place], values)
        self._held = held
        self.is_ahead = False

    @contextlib.contextmanager
    def writing_back(self) -> Iterator[None]:
        """Leaves the slots with their arrays, whatever happens inside."""
        try:
            yield
        finally:
            if self.is_ahead:
                with uninterrupted():
                    self.write_back()

    def _check_peers(self) -> None:
        """Checks, at the first program, that all processes begin with one state."""
        peers, self._peers = self._peers, None
        if peers is None:
            return
        arrays = dict(
            zip(self.state.paths, map(as_array, self.state.read()), strict=True)
        )
        check_same_state(
            peers,
            {path: each for path, each in arrays.items() if each.is_fully_addressable},
        )

    def _read(self) -> list[Any]:
        """Returns what each place holds."""
        others = self._places[len(self._variables) :]
        return [*_nnx.read_raw(self._variables), *[slot.raw() for slot, _, _ in others]]

    def _look(self) -> None:
        """Finds the places that hold something else than when last looked at."""
        before, now = self._held, self._read()
        is_other = map(operator.is_not, now, before)
        others = itertools.compress(range(len(now)), is_other)
        self._stale.update(i for i in others if not is_same_raw(now[i], before[i]))
        self._held = now
        self._has_looked = True

    def _leaves(self, place: int) -> list[tuple[int, Any]]:
        slot, start, stop = self._places[place]
        return list(zip(range(start, stop), slot.read(), strict=True))

    def _change_use(self, changed: tuple[int, ...]) -> None:
        """Prepares for another kind of program."""
        before = self._use.donated
        self._use = _find_use(changed, self.types, self._places)
        for i in {*self._use.donated}.difference(before):
            # A step that is traced again may change what the last one only read.
            if self.arrays[i] is not None:
                self.arrays[i] = self.arrays[i].copy()

    def _refresh(self) -> set[int]:
        """Places what was put into the slots; returns what they are to hold instead."""
        moved: set[int] = set()
        if not self._stale:
            return moved
        donated, changed = set(self._use.donated), set(self._use.changed)
        leaves = [pair for place in self._stale for pair in self._leaves(place)]
        for i, leaf in leaves:
            if leaf is self.arrays[i]:
                continue
            placed = _put(strong(leaf), self._homes[i], i not in donated)
            if placed is not leaf and i not in changed:
                moved.add(i)
            self.arrays[i] = placed
            self._may_share |= placed.ndim > 0
        return moved

    def _separate(self) -> set[int]:
        """Copies arrays that sit in two slots, of which one will be donated."""
        arrays, use = self.arrays, self._use
        own = set(map(id, use.pick_donated(arrays)))
        if len(own) < len(use.donated):
            own.clear()
            for i in use.donated:
                if id(arrays[i]) in own:
                    arrays[i] = arrays[i].copy()
                own.add(id(arrays[i]))
        if own.isdisjoint(map(id, use.pick_others(arrays))):
            return set()
        moved = {i for i in use.others if id(arrays[i]) in own}
        for i in moved:
            arrays[i] = arrays[i].copy()
        return moved


def _put(leaf: jax.Array, sharding: Any, may_alias: bool = True) -> jax.Array:
    target = leaf.sharding if sharding is None else sharding
    if not may_alias:
        # `device_put(..., may_alias=False)` still shares memory with one of the
        # devices.
        leaf = leaf.copy()
    # Outputs of a program are committed to their devices. If it began with arrays that
    # are not, it would be compiled again for them.
    if leaf.sharding == target and (leaf.committed or sharding is None):
        return leaf
    if not target.is_fully_addressable:
        # A copy, since JAX may keep the memory of the host as that of a device.
        placed = as_global(leaf, target)
        return placed if may_alias else placed.copy()
    return jax.device_put(leaf, target)
