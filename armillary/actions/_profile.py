"""A trace of what the devices and the host do, for a few loops of a run."""

import os
from pathlib import Path

import jax

from armillary._checks import (
    check_instance,
    check_not_negative_int,
    check_path,
    check_positive_int,
)
from armillary._logging import logger
from armillary._process import get_process
from armillary.actions._periodic import StepAction
from armillary.typing import Output


class Profile(StepAction):
    """Traces some loops of training, once, with `jax.profiler`.

    The trace begins after the first loop that reaches step `at`, and ends after the
    loop with which it holds `steps` steps, or when training ends, also by an exception.
    So it consists of whole loops, and leaves out the first one, which compiles. A run
    that resumes at `at` or later was traced before, and is not traced again::

        profile = armillary.actions.Profile(at=1000, steps=200, directory=run_dir)
        controller = armillary.Controller(..., train_actions=[profile])

    It is for `train_actions`. Of several processes, the first one traces its devices.
    While there is an action, the controller waits for each loop before it starts the
    next one, so the devices wait a moment between loops.

    Args:
        at: The global step from which to trace.
        steps: How many steps to trace, at least.
        directory: Where the trace goes, below `plugins/profile`: the directory that
            TensorBoard shows.
        options: What to trace, as `jax.profiler.ProfileOptions`. `None` leaves out the
            calls of Python functions, which fill a trace and slow the run down.

    Raises:
        TypeError: If `options` is something else.
        ValueError: If `at` is negative, `steps` not positive, or `directory` not local.
        RuntimeError: When it is called and does not know the global step, or if another
            trace is running when it begins.
    """

    def __init__(
        self,
        *,
        at: int,
        steps: int,
        directory: str | os.PathLike[str],
        options: jax.profiler.ProfileOptions | None = None,
    ) -> None:
        self.at = check_not_negative_int("at", at)
        self.steps = check_positive_int("steps", steps)
        self.directory = check_path("directory", directory)
        if "://" in self.directory:
            raise ValueError(
                f"`directory` is {self.directory!r}, but traces are local files. Use a "
                "local directory, and copy it when the run has ended."
            )
        if options is None:
            options = jax.profiler.ProfileOptions()
            options.python_tracer_level = 0
        kind, fix = jax.profiler.ProfileOptions, "Use `jax.profiler.ProfileOptions()`."
        check_instance("options", options, kind, fix)
        self._options = options
        # The step at which the trace that is running began.
        self._begun_at: int | None = None

    def __call__(self, output: Output) -> None:
        """Begins or ends the trace if it is time.

        Args:
            output: Not used.
        """
        del output
        last, now = self._advance()
        if self._begun_at is not None:
            if now >= self._begun_at + self.steps:
                self.end_training()
        elif last < self.at <= now and get_process().is_chief:
            self._start(now)

    def end_training(self) -> None:
        """Ends the trace if it is running; a `Controller` calls this."""
        if self._begun_at is not None:
            begun_at, self._begun_at = self._begun_at, None
            jax.profiler.stop_trace()
            reached = self._read_step() if self._read_step else self.last_step
            logger.info("traced steps %d to %d: %s", begun_at, reached, self.directory)

    def _start(self, step: int) -> None:
        Path(self.directory).mkdir(parents=True, exist_ok=True)
        try:
            jax.profiler.start_trace(self.directory, profiler_options=self._options)
        except RuntimeError as error:
            raise RuntimeError(
                f"`Profile(at={self.at}, steps={self.steps})` is to begin at step "
                f"{step}, but another trace is running, and JAX runs one at a time. "
                "Let `at` be a loop or more after the steps of another one."
            ) from error
        self._begun_at = step
