"""Holds a state as one flat list of arrays, where a strategy wants them.

A program may take over (donate) only buffers that nobody else holds. Arrays that come
from our own programs are such; any other array was put into its slot by the user, a
checkpoint or an initializer, and is copied first, so nothing a user holds is deleted.
Scalars (counters, sums of metrics) are never donated: a copy costs more than they do.
Where state lives in one place and programs run in others, programs take over copies,
and what they make of them is moved back.

This runs at every loop, over every array of the state, while the device may be waiting.
So the usual case, in which nobody touched a slot since the last program, is told by
identity, in passes that Python makes in C; all else is done slot by slot.

Which arrays of a state one kind of program changes, and where they come from.

All of it is indices, found once, so that handing hundreds of arrays to a program and
putting them back are a few passes that Python makes in C.
"""

import contextlib
import functools
import itertools
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias, TypeGuard

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


class FlatState:
    """The arrays of a state, for one program after another.

    In outline::

        with flat.lent(changed) as (donated, others):
            values, token = program(donated, others)
            flat.give(values, token)
        flat.write_back()

    What is lent is what the slots hold, on its devices. Where no code of the user runs
    between two programs, nothing need be written back there. Until it is, the slots
    hold arrays that are gone.

    Args:
        state: The slots.
        strategy: Says where their arrays belong.

    Attributes:
        state: As given, or as a new search has found it.
        signature: Its signature, as it was at first.
        types: Shape and dtype of the arrays, for tracing.
        arrays: The arrays, in the order of the slots. They stay good until the next
            program runs.
        strategy: Under which they are used.
        platform: The kind of device that they are on, such as `"cpu"`.
        split: As in `Strategy`.
        is_ahead: Whether the slots do not hold `arrays` yet.
    """

    def __init__(self, state: State, strategy: Strategy) -> None:
        self._peers, self._dispatch = strategy.peers, strategy.dispatch
        self.strategy = strategy
        self.platform: str = strategy.platform
        self.split = strategy.split
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
        self._use = Use((), self.types, [])
        self._bind(state)
        # What each place holds, and which places hold something else than `arrays`.
        self._held = self._read()
        self._stale = set(range(len(self._places)))
        # Indices of arrays that were moved or copied, which their slots are to hold.
        self._moved: set[int] = set()
        # Whether an array that is donated may stand in another place too.
        self._may_share = True
        self.is_ahead = False

    def rebind(self, state: State) -> None:
        """Goes on with what a new search for the same places has found."""
        # Now, and not when it is next asked: NumPy arrays can be written into.
        state.watch()
        self._bind(state)

    def _bind(self, state: State) -> None:
        self.state = state
        # NNX variables of one array come first: all of them are read in one go.
        self._places = sorted(state.ranges, key=lambda place: not is_leaf(place[0]))
        leaves = [(slot, i) for slot, i, _ in self._places if is_leaf(slot)]
        self._variables = [slot.variable for slot, _ in leaves]
        self._pick_variables = make_picker([i for _, i in leaves])
        self._use = Use(self._use.changed, self.types, self._places)
        self._has_looked = False

    def fits(self) -> bool:
        """Returns whether the slots hold what programs for this state can take.

        That is the structure that was found, with arrays of the same shape and dtype.
        """
        self._look()
        try:
            leaves = [pair for place in self._stale for pair in self._leaves(place)]
        except StateStructureError:
            return False
        types = self.types
        return all(
            (array.shape, array.dtype) == (types[i].shape, types[i].dtype)
            for i, array in ((i, as_array(leaf)) for i, leaf in leaves)
        ) and all(self._places[place][0].holds_same_objects() for place in self._stale)

    @contextlib.contextmanager
    def lent(
        self, changed: tuple[int, ...]
    ) -> Iterator[tuple[Sequence[jax.Array], Sequence[jax.Array]]]:
        """Lends the arrays to a program, in a moment that no signal cuts short."""
        taken = self.take(changed)
        self._dispatch.wait()
        with uninterrupted():
            yield taken

    def take(
        self, changed: tuple[int, ...]
    ) -> tuple[Sequence[jax.Array], Sequence[jax.Array]]:
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
        if not self.is_ahead:
            self._check_peers()
            if not self._has_looked:
                self._look()
            self._has_looked = False
            self._refresh()
        if self._may_share:
            self._separate()
        self._may_share = True
        if self._moved:
            # Code between loops must find them where the programs have them. And that
            # somebody writes into a NumPy array, identity would not tell.
            self.state.write(self.arrays, self._moved)
            self._held = self._read()
            self._moved.clear()

    def join(
        self, changed: tuple[int, ...], donated: Sequence[Any], others: Sequence[Any]
    ) -> list[Any]:
        """Returns the arrays that `take` divided, in the order of the slots."""
        order = [i for part in divide(changed, self.types) for i in part]
        arrays = dict(zip(order, [*donated, *others], strict=True))
        return [arrays[i] for i in range(len(order))]

    def shardings(self, indices: Sequence[int]) -> list[Any]:
        """Returns where programs have the arrays of `indices`; `None` for anywhere."""
        return [self._shardings[i] for i in indices]

    def describe(self, changed: tuple[int, ...]) -> tuple[list[Any], list[Any]]:
        """Returns what `take` would, as shapes and shardings; nothing is placed."""
        donated, others = (
            [
                jax.ShapeDtypeStruct(
                    self.types[i].shape,
                    self.types[i].dtype,
                    sharding=self._shardings[i],
                )
                for i in part
            ]
            for part in divide(changed, self.types)
        )
        return donated, others

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
        others = self._held[len(self._variables) :]
        held = [*self._pick_variables(arrays), *others]
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
        pairs = [
            (path, array)
            for path, array in zip(
                self.state.paths, map(as_array, self.state.read()), strict=True
            )
            if array.is_fully_addressable
        ]
        if pairs:
            check_same_state(peers, *zip(*pairs, strict=True))

    def _read(self) -> list[Any]:
        """Returns what each place holds."""
        others = self._places[len(self._variables) :]
        return [
            *_nnx.read_raw(self._variables),
            *[slot.raw() for slot, _, _ in others],
        ]

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
        self._use = Use(changed, self.types, self._places)
        for i in self._use.donated - before:
            # A step that is traced again may change what the last one only read.
            if self.arrays[i] is not None:
                self.arrays[i] = self.arrays[i].copy()

    def _refresh(self) -> None:
        """Places what was put into the slots since the last program."""
        donated, changed = self._use.donated, self._use.changes
        for place in self._stale:
            for i, leaf in self._leaves(place):
                if leaf is self.arrays[i]:
                    continue
                placed = _put(strong(leaf), self._homes[i], i not in donated)
                if placed is not leaf and i not in changed:
                    self._moved.add(i)
                self.arrays[i] = placed
                self._may_share |= placed.ndim > 0

    def _separate(self) -> None:
        """Copies arrays that sit in two slots, of which one will be donated.

        Such as a target network that was just set to the parameters. A buffer can be
        donated once, and not be read as well.
        """
        arrays, use = self.arrays, self._use
        own = set(map(id, use.pick_donated(arrays)))
        if len(own) < len(use.donated):
            own.clear()
            for i in use.donated:
                if id(arrays[i]) in own:
                    arrays[i] = arrays[i].copy()
                own.add(id(arrays[i]))
        if own.isdisjoint(map(id, use.pick_others(arrays))):
            return
        for i in use.others:
            if id(arrays[i]) in own:
                self._moved.add(i)
                arrays[i] = arrays[i].copy()


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
