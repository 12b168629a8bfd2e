"""An action that runs now and then: by steps, or by time.

What actions consist of, and what a controller asks of the parts.
"""

import time
from collections.abc import Iterable, Iterator
from types import MethodType
from typing import Any

from armillary._checks import answers_old_names, check_positive_int, check_seconds
from armillary.actions._conditions import ConditionalAction
from armillary.actions._step_action import (
    StepAction,
    as_actions,
    bind_step_counter,
    end_training,
)
from armillary.cluster._join import get_peers
from armillary.typing import Action, Output


def find_parts(actions: Iterable[Any]) -> list[Any]:
    """Returns actions, those inside them, conditions, and the objects of methods."""
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


def begin_training(actions: Iterable[Any]) -> None:
    """Tells all parts of actions that a call that trains begins."""
    for part in find_parts(actions):
        if hasattr(part, "begin_training"):
            part.begin_training()


def resume_at(step: int, actions: Iterable[Any]) -> None:
    """Lets actions that count steps go on from their last call, at `step`."""
    for part in find_parts(actions):
        if isinstance(part, StepAction):
            part.last_step = step


@answers_old_names(
    global_step="Leave it out: a `Controller` binds its own, by `bind_step_counter`."
)
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
        self.actions = as_actions(action)
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

    def bind_step_counter(self, counter: Any) -> None:
        """Takes what counts training steps; a `Controller` calls this.

        Args:
            counter: A variable such as `optimizer.step`, or a function.
        """
        super().bind_step_counter(counter)
        bind_step_counter(self.actions, counter)

    def end_training(self) -> None:
        """Tells the actions that training has ended; a `Controller` calls this."""
        end_training(self.actions)

    def _is_due(self) -> bool:
        if self.interval is None:
            return self._is_time()
        last, now = self._advance()
        return now // self.interval > last // self.interval

    def _is_time(self) -> bool:
        is_due, peers = self._has_passed(), get_peers()
        if peers is not None:
            topic = "whether an action is due"
            is_due = peers.boundary.exchange(topic, self._has_passed)[0]
        if is_due:
            self._last_time = time.monotonic()
        return is_due

    def _has_passed(self) -> bool:
        seconds = self.interval_seconds or 0.0
        return time.monotonic() - self._last_time >= seconds
