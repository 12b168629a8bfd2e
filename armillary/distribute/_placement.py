"""Keeps the arrays of slots where a strategy wants them, ready to be donated.

A program may take over (donate) only buffers that nobody else holds. Arrays that come
from our own programs are such; any other array was put into its slot by the user, a
checkpoint or an initializer, and is copied first, so nothing a user holds is deleted.
"""

from collections.abc import Collection, Sequence
from typing import Any

import jax

from armillary.distribute._strategy import Strategy
from armillary.errors import StateStructureError
from armillary.state import State, as_array, strong


class Placement:
    """Places the slots of one state, and remembers which are in place.

    Args:
        state: The slots.
        strategy: Says where they belong.
    """

    def __init__(self, state: State, strategy: Strategy) -> None:
        self._state = state
        self._shardings = [strategy.state_sharding(slot) for slot in state.owners]
        self._seen: list[Any] = [None] * len(state.paths)
        self._placed: list[Any] = [None] * len(state.paths)
        self._is_own = [False] * len(state.paths)
        self._is_moved = True
        self._donated: set[int] = set()
        self._leaves: list[Any] | None = None

    def types(self) -> list[jax.ShapeDtypeStruct]:
        """Returns shape and dtype of the slots' arrays, for tracing."""
        return [
            jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
            for leaf in map(as_array, self._state.read())
        ]

    def rebind(self, state: State) -> None:
        """Goes on with what a new search for the same places has found."""
        self._state = state
        self._leaves = None

    def shardings(self, indices: Sequence[int]) -> list[Any]:
        """Returns where the arrays of `indices` belong; `None` for anywhere."""
        return [self._shardings[i] for i in indices]

    def place(self, changed: Collection[int]) -> list[jax.Array]:
        """Returns the slots' arrays, each on its devices.

        Args:
            changed: Indices of the arrays that will be donated; the others may share
                their buffer with whatever else holds it.
        """
        donated = self._donated = set(changed)
        leaves = self._state.read() if self._leaves is None else self._leaves
        self._leaves = None
        for i, leaf in enumerate(leaves):
            may_alias = i not in donated
            # A step that is traced again may change what the last one only read.
            if leaf is not self._seen[i] or not (may_alias or self._is_own[i]):
                self._seen[i], self._is_own[i] = leaf, not may_alias
                self._placed[i] = _put(strong(leaf), self._shardings[i], may_alias)
                self._is_moved = True
        # One array may sit in two slots, such as a target network that was just set to
        # the parameters. A buffer can be donated once, and not be read as well.
        own: set[int] = set()
        for i in (*changed, *(i for i in range(len(self._placed)) if i not in donated)):
            if id(self._placed[i]) in own:
                self._placed[i] = self._placed[i].copy()
                self._is_moved = True
            elif i in donated:
                own.add(id(self._placed[i]))
        return list(self._placed)

    def has_types(self, types: Sequence[jax.ShapeDtypeStruct]) -> bool:
        """Returns whether the slots' arrays have these shapes and dtypes still.

        What it reads is kept for a `place` that follows at once.
        """
        try:
            leaves = self._state.read()
        except StateStructureError:
            return False
        self._leaves = leaves
        return all(
            leaf is seen
            or ((array := as_array(leaf)).shape, array.dtype) == (a.shape, a.dtype)
            for leaf, seen, a in zip(leaves, self._seen, types, strict=True)
        )

    def owns(self, leaf: Any) -> bool:
        """Returns whether the next program will take this array over."""
        return any(leaf is placed for placed in self._placed)

    def update(self, changed: Collection[int], values: Sequence[jax.Array]) -> None:
        """Takes over the outputs of a program, and writes them into the slots."""
        for i, value in zip(changed, values, strict=True):
            self._placed[i], self._is_own[i] = value, True
        # Slots that were moved to other devices must be found there by code between
        # loops, so a move writes all of them.
        self._state.write(self._placed, None if self._is_moved else self._donated)
        self._seen = list(self._placed)
        self._is_moved = False


def _put(leaf: jax.Array, sharding: Any, may_alias: bool) -> jax.Array:
    target = leaf.sharding if sharding is None else sharding
    if not may_alias:
        # `device_put(..., may_alias=False)` still shares memory with one of the
        # devices.
        leaf = leaf.copy()
    return leaf if leaf.sharding == target else jax.device_put(leaf, target)
