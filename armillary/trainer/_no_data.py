"""Steps without a dataset, which make their own data."""

import inspect
from collections.abc import Callable
from typing import Any, NoReturn, Self

import jax

from armillary.typing import Batch


class NoBatches:
    """Replaces the iterator of a step that has no dataset."""

    def __init__(self, argument: str, step_name: str) -> None:
        self._argument = argument
        self._step_name = step_name

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> NoReturn:
        raise TypeError(
            f"`{self._argument}` is None, so `{self._step_name}` has no batch to take. "
            f"Pass a dataset as `{self._argument}`, or make the data in the step and "
            "do not call `next(iterator)`."
        )

    get_next = __next__


def take_arguments(iterator: Any) -> tuple[Batch, ...]:
    """Returns the arguments of a pure step after the state: a batch, if there is data.

    Args:
        iterator: The argument that a trainer passes to its step.
    """
    if isinstance(iterator, NoBatches):
        return ()
    return (jax.tree.map(next, iterator),)


def check_step_arguments(
    owner: str,
    step: Callable[..., Any],
    argument: str,
    *,
    has_data: bool,
) -> None:
    """Raises if a pure step does not take the state, and a batch if there is data.

    Args:
        owner: A call that makes the trainer or evaluator, without its data.
        step: The step of a user.
        argument: The name of the argument that holds the data.
        has_data: Whether there is data.
    """
    try:
        signature = inspect.signature(step)
    except (TypeError, ValueError):  # Some built-in functions have no signature.
        return
    takes_state = takes(signature, 1)
    takes_batch = takes(signature, 2)
    name = getattr(step, "__name__", "step")
    if has_data and takes_state and not takes_batch:
        raise TypeError(
            f"`step` is `{name}{signature}`, which takes only the state, but "
            f"`{argument}` has batches for it. For a step that makes its own data, "
            f"leave the data out: `{owner})`. Otherwise, let the step take a batch: "
            "`def step(state, batch):`."
        )
    if not has_data and takes_batch and not takes_state:
        raise TypeError(
            f"`step` is `{name}{signature}`, which takes a batch, but `{argument}` is "
            f"None. Pass the data: `{owner}, dataset)`. A step that makes its own data "
            "takes only the state: `def step(state):`."
        )
    if not (takes_state or takes_batch):
        line = "def step(state, batch):" if has_data else "def step(state):"
        raise TypeError(
            f"`step` is `{name}{signature}`, but it is called with "
            f"{'the state and a batch' if has_data else 'the state'}. Write "
            f"`{line}`, and take the values out of the state in it, as in "
            "`params, opt_state, key = state`."
        )


def takes(signature: inspect.Signature, count: int) -> bool:
    """Returns whether a function can be called with so many arguments in order."""
    try:
        signature.bind(*[None] * count)
    except TypeError:
        return False
    return True
