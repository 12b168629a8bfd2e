"""What loops of training have returned, until somebody looks at it.

A trainer starts its programs and returns before the device has run them. To look at the
loss of a loop is to wait for it, so the controller first starts the next loops, and
looks then: the device always has work. A thread waits from the start, and so knows when
loops have ended: that gives the steps per second.
"""

import time
from collections.abc import Iterator
from concurrent.futures import Executor
from typing import Any

from armillary.controller._progress import fetch_output
from armillary.errors import GlobalStepError
from armillary.state._step_counter import StepCounter
from armillary.trainer._contract import AbstractTrainer, PendingLoops


class LoopReport:
    """Loops that were started together at a `step`, from the outside.

    Attributes:
        step: The global step before them.
        reached: The global step after them, as far as is known without waiting.
        seconds_per_loop: How long a loop took, once they are fetched.
    """

    def __init__(
        self,
        trainer: AbstractTrainer,
        step: int,
        num_steps: int,
        started: PendingLoops,
        counter: StepCounter,
        *,
        start: float,
        executor: Executor,
    ) -> None:
        self.step, self.seconds_per_loop = step, 0.0
        self._num_steps, self._start = num_steps, start
        self._started = started
        self._data_ended = bool(getattr(trainer, "data_exhausted", False))
        read_step = counter.snapshot()

        def wait() -> tuple[list[dict[str, Any]], int, float]:
            fetched = [
                fetch_output(output, "trainer.train") for output in started.fetch()
            ]
            return fetched, read_step(), time.perf_counter()

        self._outcome = executor.submit(wait)
        if started.num_steps is not None:
            self.reached = step + started.num_steps
        else:
            self.reached = read_step() if self._data_ended else step + num_steps

    @property
    def is_running(self) -> bool:
        """Whether the device still runs them."""
        return not self._outcome.done()

    def fetch(
        self, last_end: float
    ) -> tuple[list[tuple[int, dict[str, Any]]], float, float]:
        """Waits for the loops, and raises what went wrong in them."""
        outputs, reached, end = self._outcome.result()
        self._started.check(self.step)
        self._check_step(reached, len(outputs))
        seconds = end - max(self._start, last_end)
        self.seconds_per_loop = seconds / len(outputs)
        steps = self._steps(reached, len(outputs))
        pairs = list(zip(steps, outputs, strict=True))
        return pairs, (reached - self.step) / seconds, end

    def _steps(self, reached: int, num_loops: int) -> Iterator[int]:
        for number in range(1, num_loops):
            yield self.step + number * self._num_steps
        yield reached

    def _check_step(self, reached: int, num_loops: int) -> None:
        """Raises if the global step is not where the steps that ran have taken it."""
        num_asked = self._num_steps * num_loops
        is_known = self._started.num_steps is not None
        num_run = self._started.num_steps if is_known else num_asked
        assert num_run is not None
        expected = self.step + num_run
        if not is_known and self._data_ended:
            expected = min(max(self.step, reached), expected)
        if reached == expected:
            return
        reason = "it must"
        if num_run < num_asked:
            reason = "its data ended, and it must"
        early = ""
        if not is_known:
            early = (
                "; a trainer whose data ended early must set `self.data_exhausted = "
                "True`"
            )
        fix = (
            "Pass what every step advances by one, such as "
            f"`global_step=optimizer.step`{early}."
        )
        times, rest = divmod(reached - self.step, num_run) if num_run else (0, 1)
        if times > 1 and not rest:
            fix = (
                f"Each step advances it {times} times, as {times} updates with one "
                "optimizer do. Count the steps apart from them: "
                "`self.step = armillary.create_global_step()` in the trainer, "
                "`self.step[...] += 1` in `train_step`, and `global_step=trainer.step`."
            )
        raise GlobalStepError(
            f"`trainer.train({num_asked})` advanced `global_step` from "
            f"{self.step} to {reached}, but {reason} advance it by {num_run}, to "
            f"{expected}. {fix}"
        )
