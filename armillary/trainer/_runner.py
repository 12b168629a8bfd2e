"""What the trainer and the evaluator share: a loop over a step, under a strategy."""

import contextlib
import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from armillary._checks import check_instance
from armillary.distribute._strategy import Strategy
from armillary.distribute.program._notes import add_part_note
from armillary.distribute.replica._context import get_strategy, has_strategy
from armillary.state._holders import held_by
from armillary.trainer._datasets import check_datasets
from armillary.trainer._loop import Loop
from armillary.trainer._options import LoopOptions
from armillary.trainer._step_checks import RecordsReads, StepMethod
from armillary.typing import PyTree


@dataclass
class Run:
    """The data of a step, and what runs it: apart from the user's attributes.

    Attributes:
        loop: What ran last, a `Loop` or one on the workers of a strategy.
    """

    datasets: PyTree
    options: Any
    steps_per_loop: int | None = None
    loop: Any = None


def make_run(
    argument: str, datasets: PyTree, options: LoopOptions | None, kind: type
) -> Run:
    """Returns what is to run over the datasets that were given as an argument."""
    if options is not None:
        fix = f"Write `options=armillary.{kind.__name__}(...)`."
        check_instance("options", options, kind, fix)
    check_datasets(argument, datasets)
    return Run(datasets, options or kind())


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

    def _get_run(self, attribute: str, argument: str) -> Run:
        if attribute not in vars(self):
            raise TypeError(
                f"`{type(self).__name__}.__init__` did not call that of its base "
                "class, which takes the data. Begin it with "
                f"`super().__init__({argument})`."
            )
        return vars(self)[attribute]

    def _get_loop(self, run: Run, method: StepMethod) -> Loop:
        """Returns the loop that ran last, or a new one if its use has changed."""
        if isinstance(run.loop, Loop):
            if run.loop.serves(method, run.datasets):
                return run.loop
            run.loop.feed.close()
        run.loop = Loop(method, run.datasets)
        return run.loop

    def _get_method(
        self, run: Run, strategy: Strategy, name: str, *modes: bool
    ) -> StepMethod:
        """Returns a step of this object, as its options have it run."""
        if hasattr(inspect.getattr_static(self, name), "lower"):
            raise TypeError(
                f"`{type(self).__name__}.{name}` is compiled by `jit`, which takes no "
                "trainer. Remove the decorator: the loop compiles its steps."
            )
        step = getattr(self, name)
        return StepMethod(self, step, name, strategy, run.options, *modes)
