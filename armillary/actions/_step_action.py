"""What an action hears from a controller besides outputs.

A controller tells each of its actions which step counter is its own, once it has
restored, and when a call that trains begins, and has ended in whatever way. An action
has the methods of these names, or does not care. Actions that hold others pass the
counter and the end on; the beginning, `_parts` does.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from armillary._checks import check_callable
from armillary.state._summarize import as_step_counter
from armillary.typing import Action


def bind_step_counter(actions: Iterable[Any], counter: Any) -> None:
    """Tells actions what counts training steps."""
    for action in actions:
        if hasattr(action, "bind_step_counter"):
            action.bind_step_counter(counter)


def end_training(actions: Iterable[Any]) -> None:
    """Tells actions that a call that trains has ended, also by an exception.

    All of them are told; then the first error is raised.
    """
    errors = []
    for action in actions:
        try:
            if hasattr(action, "end_training"):
                action.end_training()
        except Exception as error:
            errors.append(error)
    if errors:
        raise errors[0]


class StepAction:
    """An action that knows the global step, once it is told what counts it."""

    _read_step: Callable[[], int] | None = None
    last_step = 0
    """The global step of the last call."""

    def bind_step_counter(self, counter: Any) -> None:
        """Takes what counts training steps; a `Controller` calls this."""
        self._read_step = as_step_counter(counter)
        self.last_step = self._read_step()

    def _advance(self) -> tuple[int, int]:
        """Returns the global step of the last call of this method, and that of now."""
        if self._read_step is None:
            raise RuntimeError(
                f"`{type(self).__name__}` was called, but does not know the global "
                "step. A `Controller` tells its actions; in a loop of your own, call "
                "`action.bind_step_counter(optimizer.step)` first."
            )
        last, self.last_step = self.last_step, self._read_step()
        return last, self.last_step


def as_actions(action: Any) -> tuple[Action, ...]:
    """Returns one action or a sequence of them as a tuple."""
    if isinstance(action, list | tuple | Iterator):
        actions = tuple(action)
        for index, item in enumerate(actions):
            check_callable(f"action[{index}]", item)
        return actions
    check_callable("action", action)
    return (action,)
