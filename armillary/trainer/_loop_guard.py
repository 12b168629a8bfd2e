"""Checks the loops of a trainer for values that are not finite, and copies that differ.

The device passes a result (`Health`, see `_step_guard.py`) from program to program.
After a step that ended training, no other step has an effect. So nothing waits for the
device before `LoopCheck.resolve`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax
import numpy as np

from armillary._checks import counted, list_lines
from armillary._logging import logger
from armillary.data.feed._position import Position
from armillary.distribute.program._replica_copies import (
    ReplicaComparison,
    check_copies,
)
from armillary.errors import NonFiniteError, ReplicaDivergenceError
from armillary.trainer._step_guard import Health
from armillary.trainer._step_method import StepMethod

_HOW_TO_FIND = (
    "To find the operation, begin the program with "
    '`jax.config.update("jax_debug_nans", True)` (`jax_debug_infs` for infinities) and '
    "run the step with `StandardTrainerOptions(compile_step=False)` on one device."
)

Halt: TypeAlias = Callable[[Sequence[Position], Sequence[int]], str | None]


class LoopGuard:
    """Checks one loop after the other."""

    def __init__(self, method: StepMethod) -> None:
        self._method = method
        strategy = method.strategy
        mesh = strategy.placement.replica_mesh if strategy.home is None else None
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
        last_check = self._loop
        self._loop = LoopCheck(self._method.name, paths, num_steps, [position])
        if last_check.is_due:
            self._loop.before = last_check
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
        if interval is None:
            return
        # The count begins in each process, and a job may be preempted more often than
        # the interval. So the first loop is compared as well.
        is_first = before == 0
        # A loop may pass a multiple of the interval without ending at it.
        is_due = is_first or before // interval < self._num_steps // interval
        if is_due:
            self._loop.checksums = self._comparison.start(arrays)

    def check(self, halt: Halt) -> "LoopCheck | None":
        """Returns the check to resolve for the last loop, if it has one."""
        self._loop.health = self.health
        self._loop.halt = halt
        self._loop.forget = self._forget
        return self._loop if self._loop.is_due else None

    def _forget(self) -> None:
        self.health = None


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
    # Lets the next loop start without the health of this loop.
    forget: Callable[[], None] = lambda: None
    # The check of the previous loop, until it is resolved. After a step that ended
    # training, only this check can report the step: later loops have no effect.
    before: "LoopCheck | None" = None
    is_resolved: bool = False

    @property
    def is_due(self) -> bool:
        """True if the loop was guarded, and nothing has read the result yet."""
        is_guarded = self.health is not None or self.checksums is not None
        return is_guarded and not self.is_resolved

    def fetch(self) -> None:
        """Waits for the loop; it may run in a different thread before `resolve`."""
        self.health, self.checksums = jax.device_get((self.health, self.checksums))

    def resolve(self, step: int | None = None) -> None:
        """Raises if a step ended training or replicas differ; logs skipped steps."""
        if self.before is not None:
            if self.before.is_due:
                self.before.resolve()
            self.before = None
        self.fetch()  # Ctrl-C may end the wait, so the check is not resolved before it
        self.is_resolved = True

        health = self.health
        count = self.num_steps
        if self.checksums is not None:
            when = f"after {_where(step, count, count)}"
            try:
                check_copies(np.asarray(self.checksums), self.paths, when)
            except ReplicaDivergenceError:
                # The program may restore a checkpoint and train on. A bad step from
                # before that must not stop these steps.
                self.forget()
                raise
        if health is None or not health.num_bad:
            return

        first = int(health.first_bad)
        bad = np.flatnonzero(health.counts).tolist()
        leaves: dict[str, int] = {}
        lines: list[str] = []
        for index in bad:
            path = self.paths[index]
            num_values = int(health.counts[index])
            leaves[path] = num_values
            lines.append(f"{path}: {counted(num_values, 'value')}")
        shown = list_lines(lines)
        where = _where(step, first + 1, count)
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
