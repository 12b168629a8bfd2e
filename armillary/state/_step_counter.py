"""Reads the global step from a variable or a function."""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from armillary._shorten import shorten
from armillary.state._adapters import variable_adapter


class StepCounter:
    """Reads a global step, which may wait for the device."""

    def __init__(self, read: Callable[[], Any]) -> None:
        self._read = read

    def __call__(self) -> int:
        return self.snapshot()()

    def snapshot(self) -> Callable[[], int]:
        """Returns a function that returns the step of now, even after more steps.

        No program reuses the memory of a scalar, so the array can still be read later.
        """
        step = self._read()
        return lambda: int(np.asarray(step))


def as_step_counter(global_step: Any, name: str = "global_step") -> StepCounter:
    """Returns a reader of the global step that a user gave as the argument `name`."""
    adapter = variable_adapter(type(global_step))
    if adapter is not None:
        return StepCounter(functools.partial(adapter.get, global_step))
    if callable(global_step):
        return StepCounter(global_step)
    raise TypeError(
        f"`{name}` is {shorten(global_step)} of type {type(global_step).__name__}, but "
        "it must be a variable that the steps advance, or a function that returns the "
        "step. Use `optimizer.step`, `armillary.create_global_step()`, or "
        "`lambda: trainer.step`."
    )
