"""Reads a global step, whatever holds it."""

from collections.abc import Callable
from typing import Any

import numpy as np
from flax import nnx


def as_step_counter(global_step: Any) -> Callable[[], int]:
    """Returns a function that reads the current global step.

    Args:
        global_step: A variable that steps advance, such as `optimizer.step` or
            `armillary.create_global_step()`, or a function without arguments, such as
            `lambda: trainer.step` where a plain attribute counts.

    Raises:
        TypeError: If `global_step` is neither, for example an array: assigning a new
            array somewhere would not change the one that was passed.
    """
    if isinstance(global_step, nnx.Variable):
        return lambda: int(np.asarray(global_step.get_value()))
    if callable(global_step):
        return lambda: int(np.asarray(global_step()))
    raise TypeError(
        f"`global_step` is {global_step!r} of type {type(global_step).__name__}, but "
        "it must be a variable that the steps advance, or a function that returns the "
        "step. Use `optimizer.step`, `armillary.create_global_step()`, or "
        "`lambda: trainer.step`."
    )
