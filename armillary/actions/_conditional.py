"""An action that runs only when a condition on the output holds."""

from collections.abc import Callable, Iterable

from armillary._checks import check_callable
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
        self.actions: tuple[Action, ...]
        if isinstance(action, Iterable) and not callable(action):
            self.actions = tuple(action)
            for index, item in enumerate(self.actions):
                check_callable(f"action[{index}]", item)
        else:
            check_callable("action", action)
            self.actions = (action,)

    def __call__(self, output: Output) -> None:
        """Runs the actions with `output` if the condition is true for it."""
        if self.condition(output):
            for action in self.actions:
                action(output)
