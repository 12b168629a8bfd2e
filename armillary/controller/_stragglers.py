"""Finds a process that the others wait for."""

import statistics
from collections.abc import Sequence
from typing import Any

from armillary._format import format_bytes
from armillary._logging import logger
from armillary.cluster._join import get_peers
from armillary.controller._run import Run
from armillary.goodput._stopwatch import Category, Straggler, Times, find_straggler
from armillary.lifeline._transfer import count_bytes

# Stragglers are found in two rounds of this many loops.
_COMPARED_LOOPS = 10


class Stragglers:
    """Finds a process that the others wait for over some loops, and warns once."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._named: set[int] = set()
        self._before = run.goodput.times
        self._bytes_before = count_bytes(Category.SAVING)
        self._num_loops = 0
        self._last: list[Times] | None = None
        # The bytes that each process has saved in the round before.
        self._last_bytes: list[int] = []

    def check(self, step: int) -> None:
        """Compares the times of all processes, which all call this after each loop."""
        peers = get_peers()
        if peers.is_alone:
            return
        self._num_loops += 1
        answers = peers.boundary.take(self._own_value)
        if not answers or not all(answers):
            return

        last = self._last
        last_bytes = self._last_bytes
        self._last = [Times._make(times) for times, _ in answers]
        self._last_bytes = [num_bytes for _, num_bytes in answers]
        count = 2 * self._num_loops
        self._num_loops = 0
        self._before = self._run.goodput.times
        self._bytes_before = count_bytes(Category.SAVING)
        found = find_straggler([last, self._last], self._named) if last else None
        if found is None:
            return
        self._named.add(found.process)
        num_bytes = list(map(sum, zip(last_bytes, self._last_bytes, strict=True)))
        text = (
            f"Process {found.process} of {peers.count} takes "
            f"{found.seconds / found.others:.1f} times as long as the others, mostly "
            f"for {_describe_phase(found, num_bytes)}: "
            f"{found.seconds / count:.3g} s per loop over {count} "
            f"loops, compared with {found.others / count:.3g} s. The others wait for "
            "it."
        )
        if peers.index == 0:
            logger.warning("%s", text)
        self._run.goodput.mark("straggler", step, text)

    def _own_value(self) -> list[Any]:
        # Rarely, because an exchange costs less if all processes send the same.
        if self._num_loops < _COMPARED_LOOPS:
            return []
        times = self._run.goodput.times.since(self._before)
        return [times, count_bytes(Category.SAVING) - self._bytes_before]


def _describe_phase(found: Straggler, num_bytes: Sequence[int]) -> str:
    """Returns the phase in which a process is slow; a save has its bytes.

    The bytes show whether the process has more to write, or a slower file system.
    """
    if found.phase != "save":
        return found.phase
    own = num_bytes[found.process]
    others = [*num_bytes[: found.process], *num_bytes[found.process + 1 :]]
    median = format_bytes(statistics.median(others))
    return f"save ({format_bytes(own)}, compared with {median})"
