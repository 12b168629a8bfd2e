"""A step that the user wrote, as its loop calls it."""

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

from armillary.distribute._strategy import Strategy
from armillary.distribute.replica._gradient import differentiating
from armillary.trainer._no_data import NoBatches, takes
from armillary.trainer._options import LoopOptions
from armillary.typing import PyTree


class StepMethod(NamedTuple):
    """A step that the user wrote: a function of a nest of iterators."""

    owner: Any  # the root of the search for state
    fn: Callable[[Any], PyTree]
    name: str  # for messages
    strategy: Strategy
    options: LoopOptions
    is_evaluation: bool  # It must not change the model; it may get parts of batches.
    keep_results: bool = False
    # The attribute of the object or its class. Each access of a method makes a new
    # `fn`, so only this shows whether the step was replaced.
    source: Any = None

    def __call__(self, iterators: Any) -> PyTree:
        if iterators is None:
            argument = "eval_dataset" if self.is_evaluation else "train_dataset"
            iterators = NoBatches(argument, self.name)
        options = self.options
        with differentiating(options.accumulate_steps, options.remat, self.name):
            return self.fn(iterators)

    @property
    def owner_name(self) -> str:
        return "the evaluator" if self.is_evaluation else "the trainer"


def check_step_signature(step: Callable[..., Any], owner: str) -> None:
    """Raises if a step takes other arguments than one iterator.

    Args:
        step: The step, without its trainer.
        owner: The class of the trainer or evaluator, for the message.
    """
    try:
        signature = inspect.signature(step)
    except (TypeError, ValueError):  # Some built-in functions have no signature.
        return
    if takes(signature, 1):
        return
    name = getattr(step, "__name__", "the step")
    first = "self, " if inspect.ismethod(step) else ""
    raise TypeError(
        f"`{owner}.{name}` has the arguments `{signature}`, but a step gets one "
        f"argument, an iterator over batches. Write `def {name}({first}iterator):`, "
        "and take a batch in it: `x, y = next(iterator)`."
    )
