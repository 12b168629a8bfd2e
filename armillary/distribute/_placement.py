"""Keeps the arrays of slots where a strategy wants them, ready to be donated.

A program may take over (donate) only buffers that nobody else holds. Arrays that come
from our own programs are such; any other array was put into its slot by the user, a
checkpoint or an initializer, and is copied first, so nothing a user holds is deleted.
"""

from collections.abc import Collection, Sequence
from typing import Any

import jax

from armillary.distribute._strategy import Strategy
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

    def types(self) -> list[jax.ShapeDtypeStruct]:
        """Returns shape and dtype of the slots' arrays, for tracing."""
        return [
            jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
            for leaf in map(as_array, self._state.read())
        ]

    def shardings(self, indices: Sequence[int]) -> list[Any]:
        """Returns where the arrays of `indices` belong; `None` for anywhere."""
        return [self._shardings[i] for i in indices]

    def place(self, changed: Collection[int]) -> list[jax.Array]:
        """Returns the slots' arrays, each on its devices.

        Args:
            changed: Indices of the arrays that will be donated; the others may share
                their buffer with whatever else holds it.
        """
        for i, leaf in enumerate(self._state.read()):
            if leaf is not self._seen[i]:
                self._seen[i] = leaf
                self._placed[i] = _put(
                    strong(leaf), self._shardings[i], i not in changed
                )
        return list(self._placed)

    def update(self, changed: Collection[int], values: Sequence[jax.Array]) -> None:
        """Takes over the outputs of a program, and writes them into the slots."""
        for i, value in zip(changed, values, strict=True):
            self._placed[i] = value
        # All slots, not only the changed ones: those that were moved to other devices
        # must be found there by code between loops.
        self._seen = list(self._placed)
        self._state.write(self._placed)


def _put(leaf: jax.Array, sharding: Any, may_alias: bool) -> jax.Array:
    target = leaf.sharding if sharding is None else sharding
    if may_alias and leaf.sharding == target:
        return leaf
    return jax.device_put(leaf, target, may_alias=may_alias)
