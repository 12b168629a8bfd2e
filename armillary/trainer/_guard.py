"""Guards the loops of a trainer: values that are not finite, copies that differ.

A loop returns before its steps have run. What is known of them stays on the device, in
small arrays that nobody waits for. Whoever started the loop resolves its `LoopCheck`
before the state counts as good, for example before it is saved. The next loop may start
before that: whether a step has ended training is an input of every program, and after
such a step no other has an effect.

Undoes steps that leave values which are not finite, on the device.

After each step the new values are looked at in one pass. Only if one of them is
infinite or not a number, the second look counts, for each array, whether there are more
of them than before the step: a log that is padded with NaN, or a best value that starts
at infinity, is no failure. What was found is kept in a few small arrays that travel
from program to program, so that Python need not wait for it.

Both looks are on the far side of a branch. XLA does not merge operations across one,
so the step is compiled to the same instructions as without them, and gives the same
bits. A step that is not compiled is looked at in NumPy, by the same rules.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from armillary._checks import list_lines
from armillary._logging import logger
from armillary.data.feed._position import Position
from armillary.distribute._global_arrays import everywhere, is_divided
from armillary.distribute.program._compare import (
    ReplicaComparison,
    check_equal,
    largest_on_replicas,
)
from armillary.errors import NonFiniteError
from armillary.state._lift import State
from armillary.state._slots import Role, Slot
from armillary.trainer._options import LoopOptions
from armillary.trainer._step_checks import StepMethod


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


_HOW_TO_FIND = (
    "To find the operation, begin the program with "
    '`jax.config.update("jax_debug_nans", True)` (`jax_debug_infs` for infinities) and '
    "run the step with `StandardTrainerOptions(compile_step=False)` on one device."
)


class LoopGuard:
    """Guards one loop after the other.

    Attributes:
        health: What is known of the current loop's steps; `None` if nobody looks.
    """

    def __init__(self, method: StepMethod, options: LoopOptions) -> None:
        self._name, self._strategy = method.name, method.strategy
        self._on_non_finite = options.on_non_finite
        self._interval = options.check_replicas_every
        strategy = method.strategy
        mesh = strategy.mesh if strategy.home is None else None
        self._comparison = ReplicaComparison(mesh, strategy.dispatch)
        self._checksums: jax.Array | None = None
        self._start: Health | None = None
        self._paths: Sequence[str] = ()
        # Where the data is at the start of the loop and after each of its steps.
        self._positions: list[tuple[Position, ...]] = []
        self._num_steps = self._num_asked = 0
        self.health: Health | None = None

    def begin(
        self, paths: Sequence[str], position: tuple[Position, ...], num_steps: int
    ) -> None:
        """Prepares for a loop over the state with these paths, from these positions."""
        self._paths, self._num_asked = paths, num_steps
        self._positions = [position]
        self._checksums = None
        if self._on_non_finite is None:
            return
        start = self._start
        if start is None or len(start.counts) != len(paths):
            start = self._strategy.layout.replicate(Health.start(len(paths)))
            self._start = start
        last = self.health
        self.health = (
            start if last is None else start._replace(is_halted=last.is_halted)
        )

    def for_step(
        self,
        state: State,
        types: Sequence[Any] | Mapping[int, Any],
        changed: Sequence[int],
    ) -> StepGuard | None:
        """Returns what looks at each step, if anything does; as `StepGuard` takes."""
        if self._on_non_finite is None:
            return None
        stops = self._on_non_finite == "raise"
        return StepGuard(state, types, changed, self._strategy.mesh, stops=stops)

    def add(self, positions: Sequence[tuple[Position, ...]]) -> None:
        """Notes where the data is after each step of those that were started."""
        if self.health is not None:
            self._positions.extend(positions)

    def finish(self, num_steps: int, read: Callable[[], Sequence[jax.Array]]) -> None:
        """Ends a loop in which `num_steps` steps ran; `read` returns the state."""
        before = self._num_steps
        self._num_steps += num_steps
        interval = self._interval
        if interval is not None and before // interval < self._num_steps // interval:
            self._checksums = self._comparison.start(read())

    def fail(
        self, error: BaseException, rewind: Callable[[Sequence[Position]], None]
    ) -> None:
        """Ends a loop with an error, which gets a note on a bad step before it."""
        check = self.check(rewind)
        self.health = None
        if check is None:
            return
        try:
            check.resolve()
        except Exception as earlier:
            error.add_note(f"Before that, {earlier}")

    def check(
        self,
        rewind: Callable[[Sequence[Position]], None],
        find_origin: Callable[[Sequence[int]], str | None] = lambda bad: None,
    ) -> "LoopCheck | None":
        """Returns what is to be resolved of the loop that ended last, if anything.

        For a bad step, the data is moved back to it by `rewind`. Then `find_origin`
        gets the indices of the arrays that it leaves bad, and says where that comes
        from if it can.
        """
        if self.health is None and self._checksums is None:
            return None
        positions = self._positions

        def halt(num_good: int, bad: Sequence[int]) -> str | None:
            self.health = None
            rewind(positions[num_good])
            return find_origin(bad)

        return LoopCheck(
            name=self._name,
            paths=self._paths,
            num_steps=self._num_asked,
            health=self.health,
            checksums=self._checksums,
            halt=halt,
        )


@dataclass(kw_only=True)
class LoopCheck:
    """Tells whether the steps of one loop are good.

    Attributes:
        name: How messages call the step.
        paths: The paths of the state's arrays.
        num_steps: Steps that the loop was to run.
        health: What is known of its steps, if anybody looked at them.
        checksums: A row for each replica, if they are to be compared.
        halt: Called with the number of good steps, and the arrays that the next one
            left bad, if that one has ended training; says where they come from.
    """

    name: str
    paths: Sequence[str]
    num_steps: int
    health: Health | None
    checksums: Any
    halt: Callable[[int, Sequence[int]], str | None]

    def fetch(self) -> None:
        """Waits for the loop; may run in another thread than `resolve`, before it."""
        self.health, self.checksums = jax.device_get((self.health, self.checksums))

    def resolve(self, step: int | None = None) -> None:
        """Raises if a step ended training or replicas differ; logs skipped steps."""
        self.fetch()
        health = self.health
        if self.checksums is not None:
            when = f"after {self._describe(step, self.num_steps)}"
            check_equal(np.asarray(self.checksums), self.paths, when)
        if health is None or not health.num_bad:
            return
        first = int(health.first_bad)
        bad = np.flatnonzero(health.counts).tolist()
        leaves = {self.paths[index]: int(health.counts[index]) for index in bad}
        shown = list_lines(
            f"{path}: {count} value{'s' if count > 1 else ''}"
            for path, count in leaves.items()
        )
        where = self._describe(step, first + 1)
        if not health.is_halted:
            logger.warning(
                "`%s` left values that are not finite in %d of %d steps, which were "
                "skipped. The first was %s:\n%s",
                self.name,
                health.num_bad,
                self.num_steps,
                where,
                shown,
            )
            return
        origin = self.halt(first, bad)
        raise NonFiniteError(
            f"`{self.name}` left values that are not finite in {len(leaves)} of "
            f"{len(self.paths)} arrays, at {where}:\n{shown}\n"
            f"The state is as it was before that step. {origin or _HOW_TO_FIND} Lower "
            'the learning rate, clip gradients, or set `on_non_finite="skip"` to leave '
            "such steps out.",
            step=None if step is None else step + first + 1,
            leaves=leaves,
        )

    def _describe(self, step: int | None, number: int) -> str:
        if step is None:
            return f"step {number} of the {self.num_steps} of this loop"
        return f"step {step + number}"
