"""Watches over the loops of a trainer: values that are not finite, copies that differ.

What it finds stays on the device until somebody resolves the `LoopCheck` of a loop. The
next loop may be started before that: whether a step has ended training is an input of
every program, so that after such a step none has an effect.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from armillary.data._position import Position
from armillary.distribute import ReplicaComparison, Strategy
from armillary.loops._loop_check import LoopCheck, Positions, Watched
from armillary.loops._non_finite import Health, StepGuard
from armillary.state import State

Types = Sequence[Any] | Mapping[int, Any]


class LoopWatch:
    """Watches over one loop after the other.

    Args:
        name: How messages call the step.
        strategy: The strategy in effect while the step runs.
        on_non_finite: As in `StandardTrainerOptions`.
        check_replicas_every: As in `StandardTrainerOptions`.

    Attributes:
        health: What is known of the current loop's steps; `None` if none is looked at.
        positions: Where the data was, for each step of the loop.
    """

    def __init__(
        self,
        name: str,
        strategy: Strategy,
        on_non_finite: str | None,
        check_replicas_every: int | None,
    ) -> None:
        self._name, self._strategy = name, strategy
        self._on_non_finite = on_non_finite
        self._interval = check_replicas_every
        self._comparison = ReplicaComparison(strategy.mesh, strategy.dispatch)
        self._checksums: jax.Array | None = None
        self._start: Any = None
        self._paths: Sequence[str] = ()
        self._num_steps = 0
        self._num_asked = 0
        self._compiled: dict[Any, Callable[..., Any]] = {}
        self.health: Health | None = None
        self.positions = Positions([])

    def begin(
        self, paths: Sequence[str], positions: Sequence[Position], num_steps: int
    ) -> None:
        """Prepares for a loop over the state with these paths, from `positions` on."""
        self._paths, self._num_asked = paths, num_steps
        self.positions = Positions(positions)
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

    def make_guard(
        self, state: State, types: Types, changed: Sequence[int]
    ) -> StepGuard | None:
        """Returns what looks at each step, if one is to be looked at."""
        if self._on_non_finite is None:
            return None
        stops = self._on_non_finite != "skip"
        return StepGuard(state, types, changed, self._strategy, stops=stops)

    def check_eagerly(
        self,
        state: State,
        changed: tuple[int, ...],
        old: Sequence[jax.Array],
        new: Sequence[jax.Array],
    ) -> tuple[list[jax.Array], Health]:
        """Runs `StepGuard.check` at once, after a step that was not compiled.

        Alone of everything in such a step, this is compiled, as it would be at every
        step otherwise: JAX runs no branch without compiling it.
        """
        key = (state.paths, changed)
        if key not in self._compiled:
            types = dict(zip(changed, new, strict=True))
            guard = self.make_guard(state, types, changed)
            assert guard is not None
            self._compiled[key] = jax.jit(guard.check)
        return self._compiled[key](list(old), list(new), self.health)

    def health_shardings(self) -> Any:
        """Returns where `health` belongs; `None` for anywhere."""
        if self.health is None or self._strategy.mesh is None:
            return None
        return jax.tree.map(lambda array: array.sharding, self.health)

    def finish(self, num_steps: int, read: Callable[[], Sequence[jax.Array]]) -> None:
        """Ends the loop, in which so many steps ran; `read` returns the state."""
        before = self._num_steps
        self._num_steps += num_steps
        interval = self._interval
        if interval is not None and before // interval < self._num_steps // interval:
            self._checksums = self._comparison.start(read())

    def fail(
        self, error: BaseException, rewind: Callable[[Sequence[Position]], None]
    ) -> None:
        """Ends the loop with an error, to which it adds what nobody else will tell."""
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
    ) -> LoopCheck | None:
        """Returns what is to be resolved of the loop that ended last, if anything.

        Args:
            rewind: Moves the data to positions that were read in the loop.
            find_origin: As in `LoopCheck`; the next step is the bad one.
        """
        if self.health is None and self._checksums is None:
            return None
        positions = self.positions

        def halt(num_good: int) -> None:
            self.health = None
            is_left_out = self._on_non_finite == "restore"
            rewind(positions.after(num_good + is_left_out))

        watched = Watched(self.health, self._checksums)
        return LoopCheck(
            self._name, self._paths, watched, self._num_asked, halt, find_origin
        )
