"""Which step a loop runs: whose it is, and under which strategy."""

from collections.abc import Callable
from typing import Any, NamedTuple

from armillary.distribute._strategy import Strategy
from armillary.distribute.replica._accumulate import accumulating
from armillary.typing import PyTree


class StepMethod(NamedTuple):
    """A step of the user's.

    Attributes:
        owner: The trainer or evaluator, from which state is reached.
        fn: The step, a function of a nest of iterators.
        name: How messages call it.
        strategy: The strategy in effect while it runs.
    """

    owner: Any
    fn: Callable[[Any], PyTree]
    name: str
    strategy: Strategy
    accumulate_steps: int = 1

    def __call__(self, iterators: Any) -> PyTree:
        """Runs the step."""
        with accumulating(self.accumulate_steps, self.name):
            return self.fn(iterators)

    @property
    def owner_name(self) -> str:
        """What messages call the owner."""
        return "the evaluator" if self.name.startswith("eval") else "the trainer"
