"""What a loop of training has returned, until somebody looks at it.

A trainer starts its programs and returns before the device has run them. To look at the
loss of a loop is to wait for it, so the controller first starts the next loop, and
looks then: the device always has work. A thread waits from the start, and so knows when
each loop has ended.
"""

import time
from concurrent.futures import Executor
from typing import Any, NamedTuple

from armillary._progress import fetch_output
from armillary._runner import AbstractTrainer
from armillary._standard_runner import StandardTrainer
from armillary._typing import Output
from armillary.errors import GlobalStepError
from armillary.loops import LoopCheck
from armillary.state import StepCounter


class StartedLoop(NamedTuple):
    """What a trainer returned of a loop, which may still run on the device.

    Attributes:
        output: The user's output.
        check: What is to be resolved of the loop, if anything.
        num_run: For how many steps there was data, if that is known.
    """

    output: Output
    check: LoopCheck | None = None
    num_run: int | None = None


class LoopReport:
    """One loop of training, from the outside.

    Args:
        trainer: The trainer that ran it.
        step: The global step before it.
        num_steps: How many steps it was asked for.
        started: What it returned.
        counter: Gives the global step.
        start: The time before it, by `time.perf_counter`.
        executor: Has a thread to wait in.

    Attributes:
        step: The global step before it.
        reached: The global step after it, as far as is known without waiting.
    """

    def __init__(
        self,
        trainer: AbstractTrainer,
        step: int,
        num_steps: int,
        started: StartedLoop,
        counter: StepCounter,
        start: float,
        executor: Executor,
    ) -> None:
        self.step = step
        self._num_steps, self._start = num_steps, start
        output, self._check, self._num_run = started
        check = self._check
        self._data_ended = bool(getattr(trainer, "data_exhausted", False))
        read_step = counter.snapshot()

        def wait() -> tuple[dict[str, Any], int, float]:
            fetched = fetch_output(output, "trainer.train")
            if check is not None:
                check.fetch()
            return fetched, read_step(), time.perf_counter()

        self._outcome = executor.submit(wait)
        if self._num_run is not None:
            self.reached = step + self._num_run
        else:
            self.reached = read_step() if self._data_ended else step + num_steps

    def ended(self) -> float | None:
        """Returns when the device had run it, `None` before, and 0 if that failed."""
        if not self._outcome.done():
            return None
        return 0.0 if self._outcome.exception() else self._outcome.result()[2]

    def fetch(self, last_end: float) -> tuple[dict[str, Any], float, float]:
        """Waits for the loop.

        Args:
            last_end: When the loop before it had ended.

        Returns:
            The output with NumPy values, its steps per second, and when it ended.

        Raises:
            GlobalStepError: If it did not advance the global step as it should.
            TypeError: If the output is neither a dictionary nor `None`.
            NonFiniteError: If a step left values that are not finite.
            ReplicaDivergenceError: If replicas hold different values.
        """
        output, reached, end = self._outcome.result()
        if self._check is not None:
            self._check.resolve(self.step)
        self._check_step(reached)
        seconds = end - max(self._start, last_end)
        return output, (reached - self.step) / seconds, end

    def _check_step(self, reached: int) -> None:
        """Raises if the global step is not where the steps that ran have taken it.

        Raises:
            GlobalStepError: If it is not.
        """
        num_run = self._num_steps if self._num_run is None else self._num_run
        expected = self.step + num_run
        if self._num_run is None and self._data_ended:
            expected = min(max(self.step, reached), expected)
        if reached == expected:
            return
        reason = "it must"
        if num_run < self._num_steps:
            reason = "its data ended, and it must"
        fix = (
            "Pass what every step advances by one, such as `global_step=optimizer.step`"
        )
        if self._num_run is None:
            fix += (
                "; a trainer whose data ended early must set `self.data_exhausted = "
                "True`"
            )
        early = ""
        if self._num_run is None:
            early = (
                "; a trainer whose data ended early must set `self.data_exhausted = "
                "True`"
            )
        raise GlobalStepError(
            f"`trainer.train({self._num_steps})` advanced `global_step` from "
            f"{self.step} to {reached}, but {reason} advance it by {num_run}, to "
            f"{expected}. Pass what every step advances by one, such as "
            f"`global_step=optimizer.step`{early}."
        )


def start_loop(
    trainer: AbstractTrainer, num_steps: int, full_steps: int
) -> StartedLoop:
    """Runs a loop, and returns without waiting for the device where it can."""
    if can_wait(trainer):
        assert isinstance(trainer, StandardTrainer)
        return StartedLoop(*trainer._train_unchecked(num_steps, full_steps))
    return StartedLoop(trainer.train(num_steps))


def can_wait(trainer: AbstractTrainer) -> bool:
    """Returns whether what `trainer` returns stays good while its next loop runs.

    A loop written by hand may return an array that its next call donates.
    """
    is_standard = type(trainer).train is StandardTrainer.train
    return is_standard and "train" not in vars(trainer)
