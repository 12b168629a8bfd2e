"""Keeps the arrays of slots where a strategy wants them, ready to be donated.

A program may take over (donate) only buffers that nobody else holds. Arrays that come
from our own programs are such; any other array was put into its slot by the user, a
checkpoint or an initializer, and is copied first, so nothing a user holds is deleted.
Scalars (counters, sums of metrics) are never donated: a copy costs more than they do.

This runs at every loop, over every array of the state, while the device may be waiting.
So the usual case, in which nobody touched a slot since the last program, is told by
identity (`Access`); all else is done slot by slot.
"""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from armillary.distribute._global_arrays import replicate
from armillary.distribute._strategy import Strategy
from armillary.distribute.program._same_values import check_same_state
from armillary.distribute.program._use import Use, join
from armillary.errors import StateStructureError
from armillary.state._access import Access
from armillary.state._lift import State, as_array, strong


class Placement:
    """Places the slots of one state, and remembers which are in place.

    Args:
        state: The slots.
        strategy: Says where they belong.

    Attributes:
        platform: The kind of device that they are on, such as `"cpu"`.
        is_held: Whether arrays wait here that the slots do not hold yet.
    """

    def __init__(self, state: State, strategy: Strategy) -> None:
        self._state, self._access = state, Access(state)
        self._peers = strategy.peers
        mesh = strategy.mesh
        self.platform: str = (
            jax.default_backend()
            if mesh is None
            else mesh.devices.flat[0].platform  # The same for all of them.
        )
        self._shardings = [strategy.state_sharding(slot) for slot in state.owners]
        # What each place held when its arrays were in place; nothing is, so far.
        self._raw: list[Any] = [_NEVER] * len(state.slots)
        # What each place held when `place` or `has_types` looked, and which of them
        # held something else before.
        self._seen: list[Any] = []
        self._stale: list[int] | None = None
        # Arrays that are not yet what their slot holds, as the slot's is elsewhere.
        self._moved: set[int] = set()
        self._is_scalar = [type_.ndim == 0 for type_ in self.types()]
        self._use = Use((), self._is_scalar, self._access)
        self._use.take([None] * len(state.paths))
        self.is_held = False
        # Whether an array that is donated may stand in another place too.
        self._may_share = True

    def types(self) -> list[jax.ShapeDtypeStruct]:
        """Returns shape and dtype of the slots' arrays, for tracing."""
        return [
            jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
            for leaf in map(as_array, self._state.read())
        ]

    def rebind(self, state: State) -> None:
        """Goes on with what a new search for the same places has found."""
        self._state, self._access, self._stale = state, Access(state), None
        self._use = self._use.copy_for(self._use.changed, self._access)

    def shardings(self, indices: Sequence[int]) -> list[Any]:
        """Returns where the arrays of `indices` belong; `None` for anywhere."""
        return [self._shardings[i] for i in indices]

    def place(
        self, changed: tuple[int, ...]
    ) -> tuple[list[jax.Array], list[jax.Array]]:
        """Returns the slots' arrays, each on its devices.

        Args:
            changed: Indices of the arrays that the program changes.

        Returns:
            The arrays that the program is to take over, and the others, which may share
            their buffer with whatever else holds it. `join` undoes the division.
        """
        if self._use.changed != changed:
            self.release()
            self._use = self._use.copy_for(changed, self._access)
        if not self.is_held:
            stale, self._stale = self._stale, None
            self._check_peers()
            self._refresh(self._find_stale() if stale is None else stale)
        if self._may_share and self._use.has_shared_buffers():
            self._separate()
        self._may_share = True
        return self._use.divide()

    def join(
        self, changed: tuple[int, ...], donated: Sequence[Any], others: Sequence[Any]
    ) -> list[Any]:
        """Returns the arrays that `place` divided, in the order of the slots."""
        return join(changed, self._is_scalar, donated, others)

    def arrays(self) -> list[jax.Array]:
        """Returns all arrays that are in place, in the order of the slots.

        They stay good until the next program runs.
        """
        return self._use.all()

    def has_types(self, types: Sequence[jax.ShapeDtypeStruct]) -> bool:
        """Returns whether the slots' arrays have these shapes and dtypes still."""
        self._stale = self._find_stale()
        try:
            return all(
                (array.shape, array.dtype) == (types[i].shape, types[i].dtype)
                for part in self._stale
                for i, leaf in self._read(part)
                for array in [as_array(leaf)]
            )
        except StateStructureError:
            return False

    def owns(self, leaf: Any) -> bool:
        """Returns whether the next program may take this array over."""
        if not isinstance(leaf, jax.Array) or leaf.ndim == 0:
            return False
        return any(leaf is array for array in self._use.all())

    def hold(self, values: Sequence[jax.Array], may_share: bool = True) -> None:
        """Takes over the outputs of the program that `place` was called for.

        Until `release` the slots hold arrays that are gone. Programs that follow at
        once, with no code of the user between, can so do without writing them.

        Args:
            values: What the program made of the arrays of `changed`.
            may_share: Whether one of them may be another one, or one that was kept.
        """
        self._use.values = list(values)
        if not self.is_held:
            self._raw, self._seen = self._seen, []
        self._may_share = may_share
        self.is_held = True

    def release(self) -> None:
        """Writes the outputs of the last program into the slots."""
        if not self.is_held:
            return
        if self._moved:
            # Code between loops must find them where the programs have them.
            written = self._moved.union(self._use.changed)
            self._state.write(self._use.all(), written)
            self._moved.clear()
            self._raw = self._access.read()
        else:
            self._raw = self._use.write(self._use.values, self._raw)
        self.is_held = False

    def update(self, values: Sequence[jax.Array]) -> None:
        """Takes over the outputs of a program, and writes them into the slots."""
        self.hold(values)
        self.release()

    def _check_peers(self) -> None:
        """Checks, at the first program, that all processes begin with one state."""
        peers, self._peers = self._peers, None
        if peers is None:
            return
        pairs = [
            (path, array)
            for path, array in zip(
                self._state.paths, map(as_array, self._state.read()), strict=True
            )
            if array.is_fully_addressable
        ]
        if pairs:
            check_same_state(peers, *zip(*pairs, strict=True))

    def _find_stale(self) -> list[int]:
        """Returns which places hold something else than when last in place."""
        self._seen = self._access.read()
        return self._access.find_changes(self._raw, self._seen)

    def _read(self, part: int) -> list[tuple[int, Any]]:
        slot, start, stop = self._access.parts[part]
        return list(zip(range(start, stop), slot.read(), strict=True))

    def _refresh(self, stale: Sequence[int]) -> None:
        """Places what was put into the slots since the last program."""
        use = self._use
        for part in stale:
            # If no program follows, the array that was there may come back.
            self._raw[part] = _NEVER
            for i, leaf in self._read(part):
                if leaf is use.get(i):
                    continue
                may_alias = i not in use.donated
                array = as_array(leaf)
                placed = _put(strong(array), self._shardings[i], may_alias)
                use.set(i, placed)
                self._may_share |= not self._is_scalar[i]
                # Identity would not tell that somebody writes into a NumPy array.
                is_mutable = isinstance(leaf, np.ndarray)
                if may_alias and (is_mutable or placed is not array):
                    self._moved.add(i)

    def _separate(self) -> None:
        """Copies arrays that sit in two slots, of which one will be donated.

        Such as a target network that was just set to the parameters. A buffer can be
        donated once, and not be read as well.
        """
        own: set[int] = set()
        for i in (*self._use.changed, *self._use.read):
            array = self._use.get(i)
            if id(array) in own:
                self._use.set(i, array.copy())
                self._moved.add(i)
            elif i in self._use.donated:
                own.add(id(array))


_NEVER = object()


def _put(leaf: jax.Array, sharding: Any, may_alias: bool) -> jax.Array:
    target = leaf.sharding if sharding is None else sharding
    if not may_alias:
        # `device_put(..., may_alias=False)` still shares memory with one of the
        # devices.
        leaf = leaf.copy()
    if leaf.sharding == target:
        return leaf
    if not target.is_fully_addressable:
        # A copy, since JAX may keep the memory of the host as that of a device.
        placed = replicate(leaf, target)
        return placed if may_alias else placed.copy()
    return jax.device_put(leaf, target)
