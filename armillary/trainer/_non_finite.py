"""Undoes steps that leave values which are not finite, on the device.

After each step the new values are looked at in one pass. Only if one of them is
infinite or not a number, the second look counts, for each array, whether there are more
of them than before the step: a log that is padded with NaN, or a best value that starts
at infinity, is no failure. What was found is kept in a few small arrays that travel
from program to program, so that Python need not wait for it.

Both looks are on the far side of a branch. XLA does not merge operations across one,
so the step is compiled to the same instructions as without them, and gives the same
bits. A step that is not compiled is looked at in NumPy, by the same rules.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from armillary.distribute._global_arrays import everywhere, is_divided
from armillary.distribute.program._decisions import largest_on_replicas
from armillary.state._lift import State
from armillary.state._slots import Role, Slot


class Health(NamedTuple):
    """What is known of the steps of one loop.

    Attributes:
        is_halted: Whether no further step may have an effect.
        num_steps: Steps that ran, with the one that stopped the loop.
        num_bad: How many of them were undone.
        first_bad: Which of them was the first.
        counts: For each array of the state, how many values that one made bad.
    """

    is_halted: Any
    num_steps: Any
    num_bad: Any
    first_bad: Any
    counts: Any

    @classmethod
    def start(cls, num_arrays: int) -> "Health":
        """Returns what is known before the first step."""
        zero, counts = np.int32(0), np.zeros(num_arrays, np.int32)
        return cls(np.bool_(False), zero, zero, zero, counts)


class StepGuard:
    """Decides, on all replicas alike, whether a step counts.

    `types` has shape and dtype of the arrays of the state, by index, and `changed`
    those that the step changes. A bad step `stops` training, or is left out.
    """

    def __init__(
        self,
        state: State,
        types: Sequence[Any] | Mapping[int, Any],
        changed: Sequence[int],
        mesh: Mesh | None,
        *,
        stops: bool,
    ) -> None:
        self._num_arrays = len(state.paths)
        self._stops = stops
        self._mesh = mesh
        self.sharding = None if mesh is None else everywhere(mesh)
        pairs = list(enumerate(changed))
        self._checked = [
            (position, index)
            for position, index in pairs
            if jnp.issubdtype(types[index].dtype, jnp.inexact)
        ]
        of_optimizer = [part for s in state.slots for part in s.is_of_optimizer()]
        self._moves_on = [
            not stops
            and not of_optimizer[index]
            and _is_counter_or_key(state.owners[index], types[index].dtype)
            for _, index in pairs
        ]

    def check(
        self, old: Sequence[Any], new: Sequence[Any], health: Health
    ) -> tuple[list[Any], Health]:
        """Returns the arrays that the step may leave, and what is known after it.

        `old` and `new` are the arrays of `changed` before and after it.
        """
        floats = [new[position] for position, _ in self._checked]
        is_fine = _fenced(self._are_finite, floats, health.num_steps)
        return jax.lax.cond(
            is_fine & ~health.is_halted,
            _go_on,
            self._look_closely,
            list(old),
            list(new),
            health,
        )

    def check_now(
        self, old: Sequence[jax.Array], new: Sequence[jax.Array], health: Health
    ) -> tuple[list[Any], Health]:
        """Returns the same as `check`, after a step that was not compiled."""
        before, after = (
            np.array([_count_now(arrays[i]) for i, _ in self._checked], np.int32)
            for arrays in (old, new)
        )
        return self._settle(old, new, before, after, jax.device_get(health))

    def _are_finite(self, arrays: Sequence[Any]) -> Any:
        if not arrays:
            return jnp.bool_(True)
        return largest_on_replicas(self._mesh, _has_bad, arrays) == 0

    def _look_closely(
        self, old: list[Any], new: list[Any], health: Health
    ) -> tuple[list[Any], Health]:
        positions = [position for position, _ in self._checked]
        pairs = [old[i] for i in positions], [new[i] for i in positions]
        before, after = (
            largest_on_replicas(self._mesh, _count_bad, arrays) for arrays in pairs
        )
        return self._settle(old, new, before, after, health)

    def _settle(
        self,
        old: Sequence[Any],
        new: Sequence[Any],
        before: Any,
        after: Any,
        health: Health,
    ) -> tuple[list[Any], Health]:
        """Returns what `check` does, given how many values of each array are bad."""
        is_bad = jnp.any(after > before) & ~health.is_halted
        undo = is_bad | health.is_halted
        kept = [
            now if moves_on else jnp.where(undo, was, now)
            for was, now, moves_on in zip(old, new, self._moves_on, strict=True)
        ]
        is_first = is_bad & (health.num_bad == 0)
        indices = np.array([index for _, index in self._checked], np.int32)
        counts = jnp.zeros(self._num_arrays, jnp.int32)
        counts = counts.at[indices].set(jnp.where(after > before, after, 0))
        return kept, Health(
            is_halted=health.is_halted | (is_bad & self._stops),
            num_steps=health.num_steps + jnp.where(health.is_halted, 0, 1),
            num_bad=health.num_bad + is_bad.astype(jnp.int32),
            first_bad=jnp.where(is_first, health.num_steps, health.first_bad),
            counts=jnp.where(is_first, counts, health.counts),
        )


def _is_counter_or_key(slot: Slot, dtype: Any) -> bool:
    if jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key):
        return True
    # Narrow integers are quantized values, and those of a metric are parts of it.
    is_counter = jnp.issubdtype(dtype, jnp.integer) and dtype.itemsize >= 4
    return is_counter and slot.role not in (Role.METRIC, Role.BATCH_STATISTIC)


def _go_on(old: list[Any], new: list[Any], health: Health) -> tuple[list[Any], Health]:
    del old
    return new, health._replace(num_steps=health.num_steps + 1)


def _fenced(fn: Any, arrays: list[Any], index: Any) -> Any:
    # A branch whose condition the compiler cannot know; the other one is never taken.
    return jax.lax.cond(
        index >= 0, fn, lambda arrays: jnp.zeros((), jnp.bool_) & fn(arrays), arrays
    )


def _has_bad(arrays: Sequence[Any]) -> Any:
    bad = [jnp.any(is_bad(array)) for array in arrays]
    return jnp.any(jnp.stack(bad)).astype(jnp.int32)


def _count_bad(arrays: Sequence[Any]) -> Any:
    if not arrays:
        return jnp.zeros(0, jnp.int32)
    return jnp.stack([jnp.sum(is_bad(array), dtype=jnp.int32) for array in arrays])


def _count_now(array: jax.Array) -> int:
    if is_divided(array):  # All processes must count the same.
        return int(_count_bad([jax.block_until_ready(array)])[0])
    parts: dict[str, int] = {}  # The worst copy of each part of the array.
    for shard in array.addressable_shards:
        count, part = (
            int(np.sum(~np.isfinite(np.asarray(shard.data)))),
            str(shard.index),
        )
        parts[part] = max(count, parts.get(part, 0))
    return sum(parts.values())


def is_bad(array: Any) -> Any:
    """Returns which values are infinite or not a number."""
    # Types of one byte lack operations on some devices; all of them fit into these.
    is_small = array.dtype.itemsize == 1
    return ~jnp.isfinite(array.astype(jnp.float32) if is_small else array)
