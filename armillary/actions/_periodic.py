"""Actions that run others, or a profiler, now and then, and what all are told.

A controller tells each action, and each one inside another, which step counter is its
own (`bind_step_counter`), that a call that trains begins (`begin_training`), and that
it has ended, in whatever way (`end_training`). An action has the methods of these
names, or does not care.
"""

import os
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import MethodType
from typing import Any

import jax

from armillary._checks import (
    check_callable,
    check_instance,
    check_not_negative_int,
    check_path,
    check_positive_int,
    check_seconds,
)
from armillary._logging import logger
from armillary._process import get_process
from armillary.cluster._join import get_peers
from armillary.state._summarize import as_step_counter
from armillary.typing import Action, Output


def tell(actions: Iterable[Any], method: str, *arguments: Any) -> None:
    """Calls a method of all parts of actions that have it, and raises the first error.

    Parts are actions, those inside them, conditions, and the objects of methods.
    """
    errors = []
    for part in find_parts(actions):
        try:
            if hasattr(part, method):
                getattr(part, method)(*arguments)
        except Exception as error:
            errors.append(error)
    if errors:
        raise errors[0]


def find_parts(actions: Iterable[Any]) -> list[Any]:
    """Returns actions and all that they consist of, each once."""
    return list({id(part): part for part in _walk(actions)}.values())


def _walk(actions: Iterable[Any]) -> Iterator[Any]:
    for action in actions:
        yield action
        if isinstance(action, ConditionalAction):
            yield from _walk((action.condition, *action.actions))
        elif isinstance(action, PeriodicAction):
            yield from _walk(action.actions)
        elif isinstance(action, MethodType):
            yield from _walk([action.__self__])


class StepAction:
    """An action that knows the global step, once it is told what counts it."""

    _read_step: Callable[[], int] | None = None
    last_step = 0
    """The global step of the last call."""

    def bind_step_counter(self, counter: Any) -> None:
        """Takes what counts training steps; a `Controller` calls this.

        Args:
            counter: A variable such as `optimizer.step`, or a function.
        """
        self._read_step = as_step_counter(counter)
        self.last_step = self._read_step()

    def resume_at(self, step: int) -> None:
        """Goes on from the last call, at `step`; a `Controller` calls this."""
        self.last_step = step

    def _advance(self) -> tuple[int, int]:
        """Returns the global step of the last call of this method, and that of now."""
        if self._read_step is None:
            raise RuntimeError(
                f"`{type(self).__name__}` was called, but does not know the global "
                "step. In a loop without a `Controller`, call "
                "`action.bind_step_counter(optimizer.step)` first."
            )
        last, self.last_step = self.last_step, self._read_step()
        return last, self.last_step


def _as_actions(action: Any) -> tuple[Action, ...]:
    actions = (
        tuple(action) if isinstance(action, list | tuple | Iterator) else (action,)
    )
    for index, each in enumerate(actions):
        is_one = len(actions) == 1 and actions[0] is action
        check_callable("action" if is_one else f"action[{index}]", each)
    return actions


class ConditionalAction:
    """Runs an action, or several in turn, if a condition holds.

    Args:
        condition: Function of the output, such as a `NewBestMetric`.
        action: What to run if the condition is true: one action or a sequence of them.

    Raises:
        TypeError: If the condition or an action is not callable.
    """

    def __init__(
        self, condition: Callable[[Output], bool], action: Action | Iterable[Action]
    ) -> None:
        check_callable("condition", condition)
        self.condition, self.actions = condition, _as_actions(action)

    def __call__(self, output: Output) -> None:
        """Runs the actions with `output` if the condition is true for it."""
        if self.condition(output):
            for action in self.actions:
                action(output)


class PeriodicAction(StepAction):
    """Runs an action, or several in turn, each time that an interval has passed.

    By steps, that is at the first output after each multiple of the interval, however
    often the run was interrupted. By time, it is at the first output when so many
    seconds have passed since the last time, or since the program began; of several
    processes, the clock of the first one counts::

        save_images = armillary.actions.PeriodicAction(write_images, interval=5000)
        back_up = armillary.actions.PeriodicAction(copy_run, interval_seconds=3600)

    Args:
        action: What to run: one action or a sequence of them.
        interval: Training steps, also where it is an action of evaluations.
        interval_seconds: Seconds; one of the two is given.

    Raises:
        TypeError: If an action is not callable.
        ValueError: If both intervals or none are given, or one is not positive.
        RuntimeError: When it is called and does not know the global step.
    """

    def __init__(
        self,
        action: Action | Iterable[Action],
        interval: int | None = None,
        *,
        interval_seconds: float | None = None,
    ) -> None:
        self.actions = _as_actions(action)
        if (interval is None) == (interval_seconds is None):
            raise ValueError(
                f"`interval` is {interval!r} and `interval_seconds` is "
                f"{interval_seconds!r}, but one of them must be given, and not both. "
                "Use `interval=1000` for steps, or `interval_seconds=600`."
            )
        if interval is not None:
            check_positive_int("interval", interval)
        else:
            fix = "Use `interval_seconds=600`."
            check_seconds("interval_seconds", interval_seconds, fix)
        self.interval, self.interval_seconds = interval, interval_seconds
        self._last_time = time.monotonic()

    def __call__(self, output: Output) -> None:
        """Runs the actions with `output` if the interval has passed."""
        if self._is_due():
            for action in self.actions:
                action(output)

    def _is_due(self) -> bool:
        if self.interval is not None:
            last, now = self._advance()
            return now // self.interval > last // self.interval
        is_due, peers = self._has_passed(), get_peers()
        if peers is not None:
            topic = "whether an action is due"
            is_due = peers.boundary.exchange(topic, self._has_passed)[0]
        if is_due:
            self._last_time = time.monotonic()
        return is_due

    def _has_passed(self) -> bool:
        return time.monotonic() - self._last_time >= (self.interval_seconds or 0.0)


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
