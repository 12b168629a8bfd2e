"""What the trainer and the evaluator share: a loop over a step, under a strategy."""

import contextlib
import inspect
from collections.abc import Iterator
from dataclasses import dataclass

from armillary.distribute._strategy import Strategy
from armillary.distribute.program._value_errors import add_part_note
from armillary.distribute.replica._context import get_strategy, has_strategy
from armillary.state._holders import held_by
from armillary.trainer._loop import Loop
from armillary.trainer._options import LoopOptions
from armillary.trainer._reads import RecordsReads
from armillary.trainer._step_method import StepMethod
from armillary.typing import PyTree


@dataclass
class Data:
    """Holds datasets apart from the user's attributes: data is not state."""

    datasets: PyTree
    steps_per_loop: int | None = None


class Runner(RecordsReads):
    """What runs a step of its own, many times."""

    @contextlib.contextmanager
    def _in_strategy(self) -> Iterator[Strategy]:
        """Enters the strategy that is in effect, or the one among the attributes."""
        own = []
        if not has_strategy():
            own = [value for _, value in held_by(self) if isinstance(value, Strategy)]
        strategy = own[0] if own else get_strategy()
        try:
            with strategy.scope() if own else contextlib.nullcontext():
                yield strategy
        except RuntimeError as error:
            add_part_note(error)
            raise

    def _check_initialized(self, attribute: str, argument: str) -> None:
        """Checks that the constructor of the base class was called."""
        if attribute not in vars(self):
            raise TypeError(
                f"`{type(self).__name__}.__init__` did not call that of its base "
                "class, which takes the data. Begin it with "
                f"`super().__init__({argument})`."
            )

    def _get_loop(
        self,
        loop: Loop | None,
        strategy: Strategy,
        datasets: PyTree,
        step_name: str,
        options: LoopOptions,
        *,
        exact: bool,
        keep_results: bool,
    ) -> Loop:
        """Returns `loop`, or a new one if there is none or its use has changed."""
        if loop is not None:
            if loop.serves(datasets, strategy, options, keep_results):
                return loop
            loop.data.feed.close()
        method = self._get_method(strategy, step_name, options)
        return Loop(method, datasets, options, exact=exact, keep_results=keep_results)

    def _get_method(
        self, strategy: Strategy, step_name: str, options: LoopOptions
    ) -> StepMethod:
        """Returns a step of this object, as its options have it run."""
        step, num_parts = getattr(self, step_name), options.accumulate_steps
        if hasattr(inspect.getattr_static(self, step_name), "lower"):
            raise TypeError(
                f"`{type(self).__name__}.{step_name}` is compiled by `jit`, which "
                "takes no trainer. Remove the decorator: the loop compiles its steps."
            )
        return StepMethod(self, step, step_name, strategy, num_parts)
