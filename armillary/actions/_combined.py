"""Actions that run other actions, and calls of a method of all their parts.

A controller calls these methods of each action, and of each action inside another, if
they exist: `bind_step_counter` with its step counter, `begin_training` when a call
begins to train, and `end_training` when it ends, even by an error.
"""

from collections.abc import Callable, Iterable, Iterator
from types import MethodType
from typing import Any

from armillary._checks import (
    check_positive_int,
    check_takes,
)
from armillary.state._step_counter import as_step_counter
from armillary.typing import Action, Output


def notify(actions: Iterable[Any], method: str, *arguments: Any) -> None:
    """Calls a method of all parts of actions; raises the first error at the end."""
    errors: list[Exception] = []
    for part in find_parts(actions):
        try:
            if hasattr(part, method):
                getattr(part, method)(*arguments)
        except Exception as error:
            errors.append(error)
    if errors:
        raise errors[0]


def find_parts(actions: Iterable[Any]) -> list[Any]:
    """Returns actions and all of their parts, each once."""
    found: dict[int, Any] = {}
    for action in actions:
        inner: tuple[Any, ...] = ()
        if isinstance(action, ConditionalAction):
            inner = (action.condition, *action.actions)
        elif isinstance(action, PeriodicAction):
            inner = action.actions
        elif isinstance(action, MethodType):
            inner = (action.__self__,)
        for part in (action, *find_parts(inner)):
            found[id(part)] = part
    return list(found.values())


class StepAction:
    """An action that uses the global step."""

    _read_step: Callable[[], int] | None = None
    last_step = 0  # the step of the last call that was complete

    def bind_step_counter(self, counter: Any) -> None:
        """Sets a step counter, such as `optimizer.step`; a `Controller` calls this."""
        self._read_step = as_step_counter(counter)
        self.last_step = self._read_step()

    def resume_at(self, step: int) -> None:
        """Continues after a last call at `step`; a `Controller` calls this."""
        self.last_step = step

    def _read_steps(self) -> tuple[int, int]:
        """Returns the global step of the last complete call, and the current one."""
        if self._read_step is None:
            raise RuntimeError(
                f"`{type(self).__name__}` was called, but it has no step counter. In a "
                "loop without a `Controller`, call "
                "`action.bind_step_counter(optimizer.step)` first."
            )
        return self.last_step, self._read_step()


def as_actions(name: str, actions: Any) -> tuple[Action, ...]:
    """Returns one action or several as a tuple; raises if one takes no output."""
    several = actions if isinstance(actions, list | tuple | Iterator) else [actions]
    found = tuple(several)
    for index, action in enumerate(found):
        shown = f"{name}[{index}]" if several is actions else name
        check_takes(shown, action, "output")
    return found


class ConditionalAction:
    """Runs an action, or several in turn, if a condition is true.

    Args:
        condition: Function of the output, such as a `NewBestMetric`.
        action: The action to run if the condition is true, or a sequence of actions.

    Raises:
        TypeError: If the condition or an action is not a function of an output.
    """

    def __init__(
        self, condition: Callable[[Output], bool], action: Action | Iterable[Action]
    ) -> None:
        check_takes("condition", condition, "output")
        self.condition = condition
        self.actions = as_actions("action", action)

    def __call__(self, output: Output) -> None:
        """Runs the actions with `output` if the condition is true for it."""
        if self.condition(output):
            for action in self.actions:
                action(output)


class PeriodicAction(StepAction):
    """Runs an action, or several in turn, each time that an interval has passed.

    It runs them at the first output after each multiple of the interval, even if the
    run was interrupted. If one of them fails and the program trains on, it runs them at
    the next output.

    Args:
        action: The action to run, or a sequence of actions.
        interval: Training steps between runs, even for an evaluation action.

    Raises:
        TypeError: If an action is not a function of an output.
        ValueError: If the interval is not positive.
        RuntimeError: When it is called without a step counter.
    """

    def __init__(self, action: Action | Iterable[Action], interval: int) -> None:
        self.actions = as_actions("action", action)
        self.interval = check_positive_int("interval", interval)

    def __call__(self, output: Output) -> None:
        """Runs the actions with `output` if the interval has passed."""
        last, now = self._read_steps()
        if now // self.interval > last // self.interval:
            for action in self.actions:
                action(output)
        # ORDER: if an action fails, the next output of this program runs it again.
        self.last_step = now
