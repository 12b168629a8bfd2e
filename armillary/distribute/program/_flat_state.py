"""Holds a state as one flat list of arrays, where a strategy wants them.

A program may take over (donate) only arrays that come from our own programs. Any other
is copied first, so nothing a user holds is deleted. Scalars are never donated.

All this runs at every loop, over every array. So the usual case, in which nobody
touched a slot, is told by identity, in passes that Python makes in C.
"""

import contextlib
import itertools
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeAlias

import jax

from armillary.distribute._dispatch import uninterrupted
from armillary.distribute._global_arrays import as_global, is_key
from armillary.distribute._strategy import Strategy
from armillary.distribute.program._compare import check_same
from armillary.errors import StateStructureError
from armillary.state import _nnx
from armillary.state._lift import State, as_array, strong
from armillary.state._slots import Slot, is_same_raw

_Picker: TypeAlias = Callable[[Sequence[Any]], Sequence[Any]]
_Parts: TypeAlias = tuple[Sequence[jax.Array], Sequence[jax.Array]]


class _Use:
    """How one kind of program uses the arrays: which it changes, and takes over."""

    def __init__(self, changed: tuple[int, ...], types: Sequence[Any]) -> None:
        self.changed = changed
        self.new = {index: number for number, index in enumerate(changed)}
        self.donated = [i for i in changed if types[i].ndim]
        read = [i for i in range(len(types)) if i not in self.new]
        self.others = [*read, *[i for i in changed if not types[i].ndim]]
        self.pick_donated = _make_picker(self.donated)
        self.pick_others = _make_picker(self.others)
        # All, of those in `changed`, followed by all of before.
        given = [self.new.get(i, len(changed) + i) for i in range(len(types))]
        self.pick_given = _make_picker(given)


def _make_picker(indices: Sequence[int]) -> _Picker:
    """Returns a function that picks the values at some indices, in one pass in C."""
    if len(indices) > 1:
        return operator.itemgetter(*indices)
    return lambda values: [values[i] for i in indices]


class FlatState:
    """The arrays of a state, `lent` to programs, which `give` new ones back."""

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
        self._use = _Use((), self.types)
        self._is_ahead = self._has_looked = False
        self._bind(state)
        # What each place holds, and which places hold something else than `arrays`.
        self._held = self._read()
        self._stale = set(range(len(self._places)))

    def rebind(self, state: State) -> None:
        """Continues with the values that a new search for the same places has found."""
        # Now, and not when it is next asked: NumPy arrays can be written into.
        state.watch()
        self._bind(state)

    def _bind(self, state: State) -> None:
        self.state = state
        # NNX variables of one array come first: all of them are read in one go.
        self._places = sorted(state.ranges, key=lambda place: not _is_leaf(place[0]))
        self._leaves = [i for slot, i, _ in self._places if _is_leaf(slot)]
        self._variables = [p[0].variable for p in self._places[: len(self._leaves)]]
        self._has_looked = False
        self._find_written()

    def _find_written(self) -> None:
        """Finds what a program changes; the user may assign the rest while it runs."""
        new, first = self._use.new, len(self._leaves)
        written = [n for n, i in enumerate(self._leaves) if i in new]
        self._written = [(n, self._leaves[n]) for n in written]
        self._written_variables = [self._variables[n] for n in written]
        self._containers: list[tuple[int, list[int]]] = []
        for number, (_, start, stop) in enumerate(self._places[first:], first):
            if offsets := [i - start for i in range(start, stop) if i in new]:
                self._containers.append((number, offsets))

    def fits(self) -> bool:
        """Returns whether the slots hold arrays and structures as were found."""
        self._look()
        self._has_looked = True  # for `settle`, which comes next
        try:
            pairs = [
                (self.types[i], as_array(leaf)) for i, leaf in self._stale_leaves()
            ]
        except StateStructureError:
            return False
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
        return (
            _put(donated, use.pick_donated(self._shardings), [True] * len(donated)),
            _put(others, use.pick_others(self._shardings)),
        )

    def settle(self, changed: tuple[int, ...]) -> None:
        """Puts what the slots hold where it lives, ready for a program."""
        if self._use.changed != changed:
            self.write_back()
            before, self._use = self._use, _Use(changed, self.types)
            self._find_written()
            for i in {*self._use.donated}.difference(before.donated):
                # A step that is traced again may change what the last one only read.
                if self.arrays[i] is not None:
                    self.arrays[i] = self.arrays[i].copy()
        moved = set() if self._is_ahead else self._refresh()
        moved |= self._separate()
        if moved:
            # Code between loops must find them where the programs have them. And that
            # somebody writes into a NumPy array, identity would not tell.
            self.state.write(self.arrays, moved)
            self._held = self._read()

    def join(
        self, changed: tuple[int, ...], donated: Sequence[Any], others: Sequence[Any]
    ) -> list[Any]:
        """Returns the arrays that `take` divided, in the order of the slots."""
        use = _Use(changed, self.types)
        order = [*use.donated, *use.others]
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
        use = _Use(changed, types)
        return list(use.pick_donated(types)), list(use.pick_others(types))

    def owns(self, leaf: Any) -> bool:
        """Returns whether the next program may take this array over."""
        if not isinstance(leaf, jax.Array) or leaf.ndim == 0:
            return False
        return any(leaf is array for array in self.arrays)

    def give(self, values: Sequence[jax.Array], token: Any) -> None:
        """Takes over the outputs of the program that the arrays were lent to."""
        if self._moves:
            values = _put(values, [self._homes[i] for i in self._use.changed])
        self.arrays = list(self._use.pick_given([*values, *self.arrays]))
        self._is_ahead = True
        self._stale.clear()
        self._dispatch.started(token)

    def write_back(self) -> None:
        """Writes the outputs of the last program into the slots."""
        if not self._is_ahead:
            return
        held = list(self._held)
        for number, i in self._written:
            held[number] = self.arrays[i]
        _nnx.write_raw(self._written_variables, [held[n] for n, _ in self._written])
        for number, offsets in self._containers:
            slot, start, _ = self._places[number]
            leaves = {offset: self.arrays[start + offset] for offset in offsets}
            held[number] = slot.replace(held[number], leaves)
        self._held = held
        self._is_ahead = False

    @contextlib.contextmanager
    def writing_back(self) -> Iterator[None]:
        """Leaves the slots with their arrays, whatever happens inside."""
        try:
            yield
        finally:
            if self._is_ahead:
                with uninterrupted():
                    self.write_back()

    def _read(self) -> list[Any]:
        others = self._places[len(self._variables) :]
        return [*_nnx.read_raw(self._variables), *[slot.raw() for slot, _, _ in others]]

    def _look(self) -> None:
        """Finds the places that hold something else than when last looked at."""
        before, now = self._held, self._read()
        is_other = map(operator.is_not, now, before)
        others = itertools.compress(range(len(now)), is_other)
        self._stale.update(i for i in others if not is_same_raw(now[i], before[i]))
        self._held = now

    def _stale_leaves(self) -> Iterable[tuple[int, Any]]:
        for slot, start, stop in map(self._places.__getitem__, self._stale):
            yield from zip(range(start, stop), slot.read(), strict=True)

    def _refresh(self) -> set[int]:
        """Places what was put into the slots; returns what they are to hold instead."""
        peers, self._peers = self._peers, None
        if peers is not None:
            # At the first program, all processes must begin with one state.
            pairs = zip(self.state.paths, map(as_array, self.state.read()), strict=True)
            whole = {path: each for path, each in pairs if each.is_fully_addressable}
            check_same(peers, "state", whole)
        if not self._has_looked:
            self._look()
        self._has_looked = False
        new, types = self._use.new, self.types
        stale = {i: x for i, x in self._stale_leaves() if x is not self.arrays[i]}
        homes = [self._homes[i] for i in stale]
        copies = [i in new and types[i].ndim > 0 for i in stale]
        placed = _put(list(map(strong, stale.values())), homes, copies)
        for i, array in zip(stale, placed, strict=True):
            self.arrays[i] = array
        return {i for i, x in stale.items() if self.arrays[i] is not x and i not in new}

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


def _is_leaf(slot: Slot) -> bool:
    return slot.is_leaf and _nnx.is_variable(slot.variable)


def _put(
    leaves: Sequence[jax.Array], shardings: Sequence[Any], copies: Sequence[bool] = ()
) -> list[jax.Array]:
    """Puts arrays where they live, some as copies; `None` is where they are."""
    if not leaves:
        return []  # As between most loops: to put nothing takes time, too.
    copies = copies or [False] * len(leaves)
    copied = iter(_copy([*itertools.compress(leaves, copies)]))
    pairs = zip(leaves, copies, strict=True)
    placed, targets = [next(copied) if is_copy else x for x, is_copy in pairs], {}
    for n, (target, is_copy) in enumerate(zip(shardings, copies, strict=True)):
        # Outputs of a program are committed to their devices. If it began with arrays
        # that are not, it would be compiled again for them.
        if target is None or (placed[n].sharding == target and placed[n].committed):
            continue
        if target.is_fully_addressable:
            targets[n] = target
            continue
        # A copy, since JAX may keep the memory of the host as that of a device.
        whole = as_global(placed[n], target)
        placed[n] = whole.copy() if is_copy else whole
    # In one call, since each costs as much as a small array.
    moved = jax.device_put([placed[n] for n in targets], list(targets.values()))
    for n, array in zip(targets, moved, strict=True):
        placed[n] = array
    return placed


def _copy(arrays: list[jax.Array]) -> list[jax.Array]:
    """Copies arrays where they are, with no program to be compiled for each shape."""
    # With `may_alias=False`, an array that goes to other devices still shares memory
    # with one of them, and keys go to the first device.
    plain = [each for each in arrays if not is_key(each)]
    # An array that spans processes needs its sharding named.
    homes = [None if each.is_fully_addressable else each.sharding for each in plain]
    copied = iter(jax.device_put(plain, homes, may_alias=False))
    return [each.copy() if is_key(each) else next(copied) for each in arrays]
