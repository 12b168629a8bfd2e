"""Traces some loops of training with `jax.profiler`."""

import os
from pathlib import Path

import jax

from armillary._checks import (
    check_not_negative_int,
    check_path,
    check_positive_int,
)
from armillary._logging import logger
from armillary._process import get_process
from armillary.actions._combined import StepAction
from armillary.typing import Output


class Profile(StepAction):
    """Traces some loops of training, once, with `jax.profiler`.

    The trace begins after the first loop that reaches step `at`. It ends after the loop
    that completes `steps` steps, or when training ends, even by an exception. So it
    consists of whole loops, without the first loop, which compiles. A run that resumes
    at `at` or later is not traced again.

    Use it in `train_actions`. In a job of several processes, the first process traces
    its devices. With any such action, the controller waits for each loop before it
    starts the next loop, so the devices wait a moment between loops.

    Args:
        at: The global step at which the trace begins. With 0, it begins after the first
            loop.
        steps: The smallest number of steps to trace.
        directory: The directory that TensorBoard shows. The trace is in its folder
            `plugins/profile`.

    Raises:
        ValueError: If `at` is negative, `steps` not positive, or `directory` not local.
        RuntimeError: When it is called without a step counter, or while another trace
            is running, because JAX can run only one.
    """

    def __init__(
        self, *, at: int, steps: int, directory: str | os.PathLike[str]
    ) -> None:
        self.at = check_not_negative_int("at", at)
        self.steps = check_positive_int("steps", steps)
        self.directory = check_path("directory", directory)
        if "://" in self.directory:
            raise ValueError(
                f"`directory` is {self.directory!r}, but traces are local files. Use a "
                "local directory, and copy it when the run has ended."
            )
        # The step at which the current trace began.
        self._begun_at: int | None = None

    def __call__(self, output: Output) -> None:
        """Begins or ends the trace, if the step is reached."""
        del output
        last, now = self._read_steps()
        self.last_step = now
        if self._begun_at is not None:
            if now >= self._begun_at + self.steps:
                self.end_training()
        # Step 0 is reached before any loop ends, so the first loop counts for it.
        elif last < max(self.at, 1) <= now and get_process().is_chief:
            self._begin(now)

    def _begin(self, step: int) -> None:
        Path(self.directory).mkdir(parents=True, exist_ok=True)
        options = jax.profiler.ProfileOptions()
        # Calls of Python functions would fill the trace, and slow down the run.
        options.python_tracer_level = 0
        jax.profiler.start_trace(self.directory, profiler_options=options)
        self._begun_at = step

    def end_training(self) -> None:
        """Ends the trace if it is running; a `Controller` calls this."""
        if self._begun_at is not None:
            begun_at = self._begun_at
            self._begun_at = None
            jax.profiler.stop_trace()
            reached = self._read_step() if self._read_step else self.last_step
            logger.info("traced steps %d to %d: %s", begun_at, reached, self.directory)
