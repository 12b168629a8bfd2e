"""What a loop of training has returned, until somebody looks at it.

A trainer starts its programs and returns before the device has run them. To look at the
loss of a loop is to wait for it, so the controller first starts the next loop, and
looks then: the device always has work. A thread waits from the start, and so knows when
each loop has ended.
"""

import time
from concurrent.futures import Executor
from typing import Any

from armillary._progress import fetch_output
from armillary._runner import AbstractTrainer
from armillary._standard_runner import StandardTrainer
from armillary._typing import Output
from armillary.errors import GlobalStepError
from armillary.loops import LoopCheck
from armillary.state import StepCounter


class LoopReport:
    """One loop of training, from the outside.

    Args:
        trainer: The trainer that ran it.
        step: The global step before it.
        num_steps: How many steps it was asked for.
        output: What it returned.
        counter: Gives the global step.
        start: The time before it, by `time.perf_counter`.
        executor: Has a thread to wait in.
        check: What is to be resolved of the loop, if anything.

    Attributes:
        step: The global step before it.
        reached: The global step after it, as far as is known without waiting.
    """

    def __init__(
        self,
        trainer: AbstractTrainer,
        step: int,
        num_steps: int,
        output: Any,
        counter: StepCounter,
        start: float,
        executor: Executor,
        check: LoopCheck | None = None,
    ) -> None:
        self.step = step
        self._check = check
        self._num_steps, self._start = num_steps, start
        self._data_ended = bool(getattr(trainer, "data_exhausted", False))
        read_step = counter.snapshot()

        def wait() -> tuple[dict[str, Any], int, float]:
            fetched = fetch_output(output, "trainer.train")
            if check is not None:
                check.fetch()
            return fetched, read_step(), time.perf_counter()

        self._outcome = executor.submit(wait)
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
        expected = self.step + self._num_steps
        is_short = self._data_ended and self.step <= reached < expected
        if reached != expected and not is_short:
            raise GlobalStepError(
                f"`trainer.train({self._num_steps})` advanced `global_step` from "
                f"{self.step} to {reached}, but it must advance it by "
                f"{self._num_steps}, to {expected}. Pass what every step advances by "
                "one, such as `global_step=optimizer.step`; a trainer whose data ended "
                "early must set `self.data_exhausted = True`."
            )
        seconds = end - max(self._start, last_end)
        return output, (reached - self.step) / seconds, end


def start_loop(
    trainer: AbstractTrainer, num_steps: int, full_steps: int
) -> tuple[Output, LoopCheck | None]:
    """Runs a loop; returns its output, and what to resolve when it is looked at."""
    if can_wait(trainer):
        assert isinstance(trainer, StandardTrainer)
        return trainer._train_unchecked(num_steps, full_steps)
    return trainer.train(num_steps), None


def can_wait(trainer: AbstractTrainer) -> bool:
    """Returns whether what `trainer` returns stays good while its next loop runs.

    A loop written by hand may return an array that its next call donates.
    """
    is_standard = type(trainer).train is StandardTrainer.train
    return is_standard and "train" not in vars(trainer)
