"""Reads a global step, whatever holds it."""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from armillary.state import _keras, _nnx


class StepCounter:
    """Reads a global step, which `read` returns as an array or a number."""

    def __init__(self, read: Callable[[], Any]) -> None:
        self._read = read

    def __call__(self) -> int:
        """Returns the current step; waits for the device if it must."""
        return int(np.asarray(self._read()))

    def snapshot(self) -> Callable[[], int]:
        """Returns what gives the step as it is now, which may wait for the device.

        A program takes no scalar over, so that the array stays good.
        """
        step = self._read()
        return lambda: int(np.asarray(step))


def as_step_counter(global_step: Any, name: str = "global_step") -> StepCounter:
    """Returns what reads the current global step, the argument `name`."""
    if _keras.is_variable(global_step):
        return StepCounter(functools.partial(_keras.value_of, global_step))
    if _nnx.is_variable(global_step):
        return StepCounter(global_step.get_value)
    if callable(global_step):
        return StepCounter(global_step)
    raise TypeError(
        f"`{name}` is {global_step!r} of type {type(global_step).__name__}, but "
        "it must be a variable that the steps advance, or a function that returns the "
        "step. Use `optimizer.step`, `armillary.create_global_step()`, or "
        "`lambda: trainer.step`."
    )
