"""Guards the loops of a trainer: values that are not finite, copies that differ.

A loop returns before its steps have run. What is known of them stays on the device, in
small arrays that nobody waits for. Whoever started the loop resolves its `LoopCheck`
before the state counts as good, for example before it is saved. The next loop may start
before that: whether a step has ended training is an input of every program, and after
such a step no other has an effect.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from armillary._checks import list_lines
from armillary._logging import logger
from armillary.data.feed._position import Position
from armillary.distribute.program._divergence import ReplicaComparison, check_equal
from armillary.errors import NonFiniteError
from armillary.state._lift import State
from armillary.trainer._non_finite import Health, StepGuard
from armillary.trainer._options import LoopOptions
from armillary.trainer._step_method import StepMethod

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
        mesh = strategy.mesh if strategy.has_copies else None
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
