"""What a loop of training has yet to tell, once the device has run it.

A loop returns before its steps have run, and so does what watches over them: small
arrays that nobody waits for. Whoever started the loop resolves them before its state
counts as good, such as before it is saved.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import numpy as np

from armillary._logging import logger
from armillary.data._position import Position
from armillary.distribute import check_equal
from armillary.errors import NonFiniteError
from armillary.loops._non_finite import Health

_MOST_LINES = 20
_HOW_TO_FIND = (
    "To find the operation, begin the program with "
    '`jax.config.update("jax_debug_nans", True)` (`jax_debug_infs` for infinities) and '
    "run the step with `StandardTrainerOptions(compile_step=False)` on one device."
)


class Positions:
    """Where the data was before and after each step of one loop.

    Args:
        start: Where it was before the first of them, for each dataset.
    """

    def __init__(self, start: Sequence[Position]) -> None:
        self._start = tuple(start)
        self._parts: list[tuple[Sequence[tuple[Position, ...]], int, int]] = []

    def add(
        self, positions: Sequence[tuple[Position, ...]], start: int, num_steps: int
    ) -> None:
        """Notes that so many steps ran, from `start` on, of a chunk's positions."""
        self._parts.append((positions, start, num_steps))

    def after(self, num_steps: int) -> tuple[Position, ...]:
        """Returns the positions after the first steps of the loop."""
        position = self._start
        for positions, start, count in self._parts:
            if num_steps > 0:
                position = positions[start + min(num_steps, count) - 1]
            num_steps -= count
        return position


class Watched(NamedTuple):
    """What is known of a loop on the device.

    Attributes:
        health: Its steps that were undone, if that was asked for.
        checksums: A row for each replica, if they are to be compared.
    """

    health: Health | None
    checksums: jax.Array | None


class LoopCheck:
    """Tells whether the steps of one loop are good.

    Args:
        name: How messages call the step.
        paths: The paths of the state's arrays.
        watched: What is known on the device.
        num_steps: Steps that the loop was to run.
        halt: Called with the number of good steps if a step has ended training.
        find_origin: Called after that with the indices of the arrays that the step left
            bad; returns a sentence on where that comes from, if it is known.
    """

    def __init__(
        self,
        name: str,
        paths: Sequence[str],
        watched: Watched,
        num_steps: int,
        halt: Callable[[int], None],
        find_origin: Callable[[Sequence[int]], str | None],
    ) -> None:
        self._name, self._paths = name, paths
        self._watched = watched
        self._num_steps = num_steps
        self._halt, self._find_origin = halt, find_origin

    def fetch(self) -> None:
        """Waits for the loop; may run in another thread than `resolve`, before it."""
        self._watched = jax.device_get(self._watched)

    def resolve(self, step: int | None = None) -> None:
        """Raises if a step has ended training, or replicas differ; logs what was left.

        Args:
            step: The global step before the loop, if it is known.

        Raises:
            NonFiniteError: If a step left values that are not finite.
            ReplicaDivergenceError: If replicas hold different values.
        """
        self.fetch()
        health, checksums = self._watched
        if checksums is not None:
            when = f"after {self._describe(step, self._num_steps)}"
            check_equal(np.asarray(checksums), self._paths, when)
        if health is None or not health.num_bad:
            return
        first = int(health.first_bad)
        leaves = {
            path: int(count)
            for path, count in zip(self._paths, health.counts, strict=True)
            if count
        }
        where = self._describe(step, first + 1)
        if not health.is_halted:
            logger.warning(
                "`%s` left values that are not finite in %d of %d steps, which were "
                "skipped. The first was %s:\n%s",
                self._name,
                health.num_bad,
                self._num_steps,
                where,
                _list(leaves),
            )
            return
        self._halt(first)
        origin = self._find_origin(np.flatnonzero(health.counts).tolist())
        raise NonFiniteError(
            f"`{self._name}` left values that are not finite in {len(leaves)} of "
            f"{len(self._paths)} arrays, at {where}:\n{_list(leaves)}\n"
            f"The state is as it was before that step. {origin or _HOW_TO_FIND} Lower "
            'the learning rate, clip gradients, or set `on_non_finite="skip"` to leave '
            "such steps out.",
            step=None if step is None else step + first + 1,
            leaves=leaves,
        )

    def _describe(self, step: int | None, number: int) -> str:
        if step is None:
            return f"step {number} of the {self._num_steps} of this loop"
        return f"step {step + number}"


def _list(leaves: dict[str, int]) -> str:
    lines = [
        f"  {path}: {count} value{'s' if count > 1 else ''}"
        for path, count in leaves.items()
    ]
    if len(lines) > _MOST_LINES:
        lines[_MOST_LINES:] = [f"  ... and {len(lines) - _MOST_LINES} more"]
    return "\n".join(lines)
