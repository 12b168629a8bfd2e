"""An action that runs only when a condition on the output holds."""

from collections.abc import Callable, Iterable
from typing import Any

from armillary._checks import check_callable
from armillary.actions._step_action import (
    as_actions,
    bind_step_counter,
    end_training,
)
from armillary.typing import Action, Output


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
        self.condition = condition
        self.actions = as_actions(action)

    def __call__(self, output: Output) -> None:
        """Runs the actions with `output` if the condition is true for it."""
        if self.condition(output):
            for action in self.actions:
                action(output)

    def bind_step_counter(self, counter: Any) -> None:
        """Tells the condition and the actions what counts training steps.

        Args:
            counter: A variable such as `optimizer.step`, or a function.
        """
        bind_step_counter((self.condition, *self.actions), counter)

    def end_training(self) -> None:
        """Tells the condition and the actions that training has ended."""
        end_training((self.condition, *self.actions))
