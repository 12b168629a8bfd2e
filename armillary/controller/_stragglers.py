"""Finds a process that the others wait for."""

from armillary._logging import logger
from armillary.cluster._join import get_peers
from armillary.controller._run import Run
from armillary.goodput._stopwatch import Times, find_straggler

# Stragglers are found in two rounds of this many loops.
_COMPARED_LOOPS = 10


class Stragglers:
    """Finds a process that the others wait for over some loops, and warns once."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._named: set[int] = set()
        self._before = run.goodput.times
        self._num_loops = 0
        self._last: list[Times] | None = None

    def look(self, step: int) -> None:
        """Compares the times of all processes, which all call this after each loop."""
        peers = get_peers()
        if peers.is_alone:
            return
        self._num_loops += 1
        answers = peers.boundary.take(self._own_value)
        if not answers or not all(answers):
            return

        last = self._last
        self._last = [Times._make(answer) for answer in answers]
        count = 2 * self._num_loops
        self._num_loops = 0
        self._before = self._run.goodput.times
        found = find_straggler([last, self._last], self._named) if last else None
        if found is None:
            return
        self._named.add(found.process)
        text = (
            f"Process {found.process} of {peers.count} takes "
            f"{found.seconds / found.others:.1f} times as long as the others, mostly "
            f"for {found.phase}: {found.seconds / count:.3g} s per loop over {count} "
            f"loops, compared with {found.others / count:.3g} s. The others wait for "
            "it."
        )
        if peers.index == 0:
            logger.warning("%s", text)
        self._run.goodput.mark("straggler", step, text)

    def _own_value(self) -> list[float]:
        # Rarely, because an exchange costs less if all processes send the same.
        if self._num_loops < _COMPARED_LOOPS:
            return []
        return list(self._run.goodput.times.since(self._before))
