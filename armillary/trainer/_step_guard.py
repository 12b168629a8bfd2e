"""Undoes a step on the device if it leaves values that are not finite.

After each step, one pass checks the new values. Only if a value is infinite or not a
number, a second pass counts whether an array has more such values than before the step.
Both passes are behind a branch, and XLA merges no operations across a branch. So the
step gives the same bits as without the checks.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from armillary.distribute._global_arrays import everywhere
from armillary.distribute.program._replica_copies import largest_on_replicas
from armillary.state._lift import State
from armillary.state._slots import LeafKind, Role, Trait, has_trait
from armillary.trainer._step_method import StepMethod


class Health(NamedTuple):
    """The health of the steps of one loop.

    Attributes:
        is_halted: Whether no further step may have an effect.
        num_steps: The steps that ran, including the step that stopped the loop.
        num_bad: The steps that were undone.
        first_bad: The index of the first step that was undone.
        counts: For each array of the state, the bad values that this step left.
    """

    is_halted: Any
    num_steps: Any
    num_bad: Any
    first_bad: Any
    counts: Any

    @classmethod
    def start(cls, num_arrays: int) -> "Health":
        zero = np.int32(0)
        counts = np.zeros(num_arrays, np.int32)
        return cls(np.bool_(False), zero, zero, zero, counts)


class StepGuard:
    """Decides whether a step counts, or is undone, with one answer for all replicas.

    `changed` has the indices of the arrays that the step changes. Inside this class, an
    array's place is its position in `changed`.
    """

    def __init__(
        self,
        state: State,
        types: Sequence[Any],
        changed: Sequence[int],
        method: StepMethod,
    ) -> None:
        self._mesh = method.strategy.placement.replica_mesh
        self.sharding = None if self._mesh is None else everywhere(self._mesh)
        self._stops = method.options.on_non_finite == "raise"

        of_optimizer = state.of_optimizer
        self._sums: set[int] = set()
        self._checked: list[int] = []
        # Whether each array keeps its new value after a bad step.
        self._moves_on: list[bool] = []
        for place, index in enumerate(changed):
            dtype = types[index].dtype
            variable = state.owners[index].variable
            is_exact_sum = has_trait(variable, Trait.MARKS_NOT_FINITE)
            if is_exact_sum:
                self._sums.add(place)
            if is_exact_sum or jnp.issubdtype(dtype, jnp.inexact):
                self._checked.append(place)

            # With its old key, the next step would draw the same random numbers again.
            may_move = not self._stops and not of_optimizer[index]
            is_counter_or_key = _is_counter_or_key(state.kinds[index], dtype)
            self._moves_on.append(may_move and is_counter_or_key)

        indices = [changed[place] for place in self._checked]
        self._indices = np.array(indices, np.int32)

    def check(
        self, old: Sequence[Any], new: Sequence[Any], health: Health
    ) -> tuple[list[Any], Health]:
        """Returns the arrays to keep after the step, and the new health."""

        def are_finite(arrays: Sequence[Any]) -> Any:
            if not arrays:
                return jnp.bool_(True)
            return largest_on_replicas(self._mesh, _has_bad, arrays) == 0

        def never_runs(arrays: Sequence[Any]) -> Any:
            return jnp.zeros((), jnp.bool_) & are_finite(arrays)

        def keep_all(
            old: list[Any], new: list[Any], last: Health
        ) -> tuple[list[Any], Health]:
            del old
            return new, last._replace(num_steps=last.num_steps + 1)

        # Always true, but the compiler cannot know it, so it keeps the branch.
        has_begun = health.num_steps >= 0
        is_fine = jax.lax.cond(has_begun, are_finite, never_runs, self._floats_of(new))
        return jax.lax.cond(
            is_fine & ~health.is_halted,
            keep_all,
            self._look_closely,
            list(old),
            list(new),
            health,
        )

    def _floats_of(self, arrays: Sequence[Any]) -> list[Any]:
        """Returns the floats to check; an exact sum becomes NaN after a bad value."""
        floats: list[Any] = []
        for place in self._checked:
            array = arrays[place]
            floats.append(_read_mark(array) if place in self._sums else array)
        return floats

    def _look_closely(
        self, old: Sequence[Any], new: Sequence[Any], health: Health
    ) -> tuple[list[Any], Health]:
        """Undoes the step if an array has more bad values than before."""
        is_halted = health.is_halted
        before = largest_on_replicas(self._mesh, _count_bad, self._floats_of(old))
        after = largest_on_replicas(self._mesh, _count_bad, self._floats_of(new))
        has_more = after > before
        is_bad = jnp.any(has_more) & ~is_halted

        undo = is_bad | is_halted
        kept: list[Any] = []
        for was, now, moves_on in zip(old, new, self._moves_on, strict=True):
            kept.append(now if moves_on else jnp.where(undo, was, now))

        # Only the first bad step is reported.
        is_first = is_bad & (health.num_bad == 0)
        made_bad = jnp.where(has_more, after, 0)
        counts = jnp.zeros_like(health.counts).at[self._indices].set(made_bad)
        return kept, Health(
            is_halted=is_halted | (is_bad & self._stops),
            num_steps=health.num_steps + jnp.where(is_halted, 0, 1),
            num_bad=health.num_bad + is_bad.astype(jnp.int32),
            first_bad=jnp.where(is_first, health.num_steps, health.first_bad),
            counts=jnp.where(is_first, counts, health.counts),
        )


def _is_counter_or_key(kind: LeafKind, dtype: Any) -> bool:
    if jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key):
        return True
    # Narrow integers are quantized values, and integers in metrics are parts of sums.
    is_counter = jnp.issubdtype(dtype, jnp.integer) and dtype.itemsize >= 4
    return is_counter and kind.role not in (Role.METRIC, Role.BATCH_STATISTIC)


def _read_mark(parts: Any) -> Any:
    """Returns NaN for each exact sum that has taken a value that was not finite."""
    is_marked = jnp.any(parts[..., -1] != 0, axis=0)
    return jnp.where(is_marked, jnp.nan, 0.0)


def _has_bad(arrays: Sequence[Any]) -> Any:
    bad = [jnp.any(is_bad(array)) for array in arrays]
    return jnp.any(jnp.stack(bad)).astype(jnp.int32)


def _count_bad(arrays: Sequence[Any]) -> Any:
    if not arrays:
        return jnp.zeros(0, jnp.int32)
    return jnp.stack([jnp.sum(is_bad(array), dtype=jnp.int32) for array in arrays])


def is_bad(array: Any) -> Any:
    """Returns which values are infinite or not a number."""
    if array.dtype.itemsize == 1:
        # Some devices lack operations for types of one byte. All of these fit into
        # float32.
        array = array.astype(jnp.float32)
    return ~jnp.isfinite(array)
