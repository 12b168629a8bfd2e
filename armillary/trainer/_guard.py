"""Checks the loops of a trainer for values that are not finite, and copies that differ.

After each step, one pass checks the new values. Only if a value is infinite or not a
number, a second pass counts whether an array has more such values than before the step.
The result (`Health`) is passed from program to program. After a step that ended
training, no other step has an effect. So nothing waits for the device before
`LoopCheck.resolve`.

Both passes are behind a branch, and XLA merges no operations across a branch. So the
step gives the same bits as without the checks.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from armillary._checks import counted, list_lines
from armillary._logging import logger
from armillary.data.feed._stream import Position
from armillary.distribute._global_arrays import everywhere
from armillary.distribute.program._replica_copies import (
    ReplicaComparison,
    check_copies,
    largest_on_replicas,
)
from armillary.errors import NonFiniteError
from armillary.state._lift import State
from armillary.state._slots import LeafKind, Role, Trait, has_trait
from armillary.trainer._runner import StepMethod

_HOW_TO_FIND = (
    "To find the operation, begin the program with "
    '`jax.config.update("jax_debug_nans", True)` (`jax_debug_infs` for infinities) and '
    "run the step with `StandardTrainerOptions(compile_step=False)` on one device."
)

Halt: TypeAlias = Callable[[Sequence[Position], Sequence[int]], str | None]


class Health(NamedTuple):
    """The health of the steps of one loop."""

    is_halted: Any  # whether no further step may have an effect
    num_steps: Any  # number of steps that ran, including the step that stopped the loop
    num_bad: Any  # number of steps that were undone
    first_bad: Any  # index of the first step that was undone
    counts: Any  # for each array of the state, the values that this step made bad

    @classmethod
    def start(cls, num_arrays: int) -> "Health":
        zero = np.int32(0)
        counts = np.zeros(num_arrays, np.int32)
        return cls(np.bool_(False), zero, zero, zero, counts)


class StepGuard:
    """Decides whether a step counts, or is undone, with one answer for all replicas.

    `changed` has the indices of the arrays that the step changes.
    """

    def __init__(
        self,
        state: State,
        types: Sequence[Any],
        changed: Sequence[int],
        method: StepMethod,
    ) -> None:
        self._mesh = method.strategy.mesh
        self.sharding = None if self._mesh is None else everywhere(self._mesh)
        self._stops = method.options.on_non_finite == "raise"
        mark = Trait.MARKS_NOT_FINITE
        marked = [has_trait(slot.variable, mark) for slot in state.owners]
        self._sums = {place for place, i in enumerate(changed) if marked[i]}
        is_float = [jnp.issubdtype(types[i].dtype, jnp.inexact) for i in changed]
        self._checked = [
            place for place, each in enumerate(is_float) if each or place in self._sums
        ]
        self._indices = np.array([changed[i] for i in self._checked], np.int32)
        of_optimizer = [part for s in state.slots for part in s.is_of_optimizer()]
        self._moves_on = [
            not self._stops
            and not of_optimizer[i]
            and _is_counter_or_key(state.kinds[i], types[i].dtype)
            for i in changed
        ]

    def check(
        self, old: Sequence[Any], new: Sequence[Any], health: Health
    ) -> tuple[list[Any], Health]:
        """Returns the arrays to keep after the step, and the new health."""

        def are_finite(arrays: Sequence[Any]) -> Any:
            if not arrays:
                return jnp.bool_(True)
            return largest_on_replicas(self._mesh, _has_bad, arrays) == 0

        is_fine = jax.lax.cond(
            # Always true, but the compiler cannot know it, so it keeps the branch.
            health.num_steps >= 0,
            are_finite,
            lambda arrays: jnp.zeros((), jnp.bool_) & are_finite(arrays),
            self._floats_of(new),
        )
        return jax.lax.cond(
            is_fine & ~health.is_halted,
            lambda _, new, last: (new, last._replace(num_steps=last.num_steps + 1)),
            self._look_closely,
            list(old),
            list(new),
            health,
        )

    def _floats_of(self, arrays: Sequence[Any]) -> list[Any]:
        """Returns the floats to check; an exact sum becomes NaN after a bad value."""
        return [
            _read_mark(arrays[place]) if place in self._sums else arrays[place]
            for place in self._checked
        ]

    def _look_closely(
        self, old: Sequence[Any], new: Sequence[Any], health: Health
    ) -> tuple[list[Any], Health]:
        before, after = (
            largest_on_replicas(self._mesh, _count_bad, self._floats_of(each))
            for each in (old, new)
        )
        is_bad = jnp.any(after > before) & ~health.is_halted
        undo = is_bad | health.is_halted
        kept = [
            now if moves_on else jnp.where(undo, was, now)
            for was, now, moves_on in zip(old, new, self._moves_on, strict=True)
        ]
        is_first = is_bad & (health.num_bad == 0)
        counts = jnp.zeros_like(health.counts)
        counts = counts.at[self._indices].set(jnp.where(after > before, after, 0))
        return kept, Health(
            is_halted=health.is_halted | (is_bad & self._stops),
            num_steps=health.num_steps + jnp.where(health.is_halted, 0, 1),
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
    return jnp.where(jnp.any(parts[..., -1] != 0, axis=0), jnp.nan, 0.0)


def _has_bad(arrays: Sequence[Any]) -> Any:
    bad = [jnp.any(is_bad(array)) for array in arrays]
    return jnp.any(jnp.stack(bad)).astype(jnp.int32)


def _count_bad(arrays: Sequence[Any]) -> Any:
    if not arrays:
        return jnp.zeros(0, jnp.int32)
    return jnp.stack([jnp.sum(is_bad(array), dtype=jnp.int32) for array in arrays])


def is_bad(array: Any) -> Any:
    """Returns which values are infinite or not a number."""
    # Some devices lack operations for types of one byte. All of these fit into float32.
    is_small = array.dtype.itemsize == 1
    return ~jnp.isfinite(array.astype(jnp.float32) if is_small else array)


class LoopGuard:
    """Checks one loop after the other."""

    def __init__(self, method: StepMethod) -> None:
        self._method = method
        strategy = method.strategy
        mesh = strategy.mesh if strategy.home is None else None
        self._comparison = ReplicaComparison(mesh, strategy.dispatch)
        self._start = Health.start(0)
        self._num_steps = 0
        self._loop = LoopCheck(method.name, (), 0, [])
        # The health of the current loop, if `on_non_finite` is set.
        self.health: Health | None = None

    def begin(
        self, paths: Sequence[str], position: tuple[Position, ...], num_steps: int
    ) -> None:
        """Prepares for a loop.

        Args:
            paths: The paths of the arrays of the state.
            position: The positions in the data at the start of the loop.
            num_steps: The number of steps of the loop.
        """
        self._loop = LoopCheck(self._method.name, paths, num_steps, [position])
        if self._method.options.on_non_finite is None:
            return
        if len(self._start.counts) != len(paths):
            layout = self._method.strategy.layout
            self._start = layout.replicate(Health.start(len(paths)))
        last = self.health or self._start
        self.health = self._start._replace(is_halted=last.is_halted)

    def add(self, positions: Sequence[tuple[Position, ...]]) -> None:
        if self.health is not None:
            self._loop.positions.extend(positions)

    def finish(self, num_steps: int, arrays: Sequence[jax.Array]) -> None:
        """Ends a loop of `num_steps` steps, which left the state in `arrays`."""
        before = self._num_steps
        self._num_steps += num_steps
        interval = self._method.options.check_replicas_every
        if interval is not None and before // interval < self._num_steps // interval:
            self._loop.checksums = self._comparison.start(arrays)

    def check(self, halt: Halt) -> "LoopCheck | None":
        """Returns the check to resolve for the last loop, if it has one."""
        self._loop.health = self.health
        self._loop.halt = halt
        is_guarded = self.health is not None or self._loop.checksums is not None
        return self._loop if is_guarded else None


@dataclass
class LoopCheck:
    """The result of checking one loop, which `resolve` reads.

    `halt` takes the positions in the data before a bad step, and the indices of the
    arrays that the step left bad.
    """

    name: str
    paths: Sequence[str]
    num_steps: int
    positions: list[tuple[Position, ...]]  # at the start, and after each step
    health: Health | None = None
    checksums: Any = None
    halt: Halt = lambda position, bad: None

    def fetch(self) -> None:
        """Waits for the loop; it may run in a different thread before `resolve`."""
        self.health, self.checksums = jax.device_get((self.health, self.checksums))

    def resolve(self, step: int | None = None) -> None:
        """Raises if a step ended training or replicas differ; logs skipped steps."""
        self.fetch()
        health = self.health
        count = self.num_steps
        if self.checksums is not None:
            when = f"after {_where(step, count, count)}"
            check_copies(np.asarray(self.checksums), self.paths, when)
        if health is None or not health.num_bad:
            return
        first = int(health.first_bad)
        bad = np.flatnonzero(health.counts).tolist()
        leaves = {self.paths[index]: int(health.counts[index]) for index in bad}
        where = _where(step, first + 1, count)
        shown = list_lines(f"{p}: {counted(n, 'value')}" for p, n in leaves.items())
        if not health.is_halted:
            logger.warning(
                f"`{self.name}` left values that are not finite in {health.num_bad} of "
                f"{count} steps, which were skipped. The first was {where}:\n{shown}"
            )
            return
        origin = self.halt(self.positions[first], bad) or _HOW_TO_FIND
        raise NonFiniteError(
            f"`{self.name}` left values that are not finite in {len(leaves)} of "
            f"{len(self.paths)} arrays, at {where}:\n{shown}\n"
            f"The state is the same as before that step. {origin} Lower the learning "
            'rate, clip gradients, or set `on_non_finite="skip"` to leave such steps '
            "out.",
            step=None if step is None else step + first + 1,
            leaves=leaves,
        )


def _where(step: int | None, number: int, num_steps: int) -> str:
    if step is None:
        return f"step {number} of the {num_steps} of this loop"
    return f"step {step + number}"
