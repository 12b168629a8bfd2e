"""`model.fit` of Keras on the workers of a `ParameterServerStrategy`.

Keras runs its own loop over epochs and callbacks in this process, and calls a function
that takes many steps at once: here one that schedules them, and waits for all.
"""

import itertools
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax
import numpy as np

from armillary.parameter_server._closures import RemoteValue
from armillary.parameter_server._coordinator import ClusterCoordinator
from armillary.state import _keras

# Batches that wait for each worker: it shall not wait for one, and they need memory.
_WAITING = 4


class ScheduledSteps:
    """What Keras calls to train, instead of a compiled step."""

    def __init__(self, model: Any, strategy: Any) -> None:
        self.model, self.strategy = model, strategy
        self.num_steps = 1
        self._coordinator = ClusterCoordinator(strategy)
        self._limit = _WAITING * strategy.num_workers

    def __call__(self, state: Any, iterator: Iterator[Any]) -> tuple[Any, Any]:
        """Takes batches, and returns when a step of each has ended."""
        # If there is none, Keras hears so.
        batches = itertools.chain([next(iterator)], iterator)
        for values, variables in zip(state, self._variables(), strict=True):
            for variable, value in zip(variables, values, strict=True):
                _keras.set_value(variable, value)
        begun: deque[RemoteValue] = deque()
        for batch in itertools.islice(batches, self.num_steps):
            args = (jax.tree.map(np.asarray, batch),)
            begun.append(self._coordinator.schedule(self.step, args=args))
            if len(begun) > self._limit:
                begun.popleft().wait()
        self._coordinator.join()
        return dict(self.model.get_metrics_result()), self._values()

    def step(self, batch: Any) -> None:
        """Takes one step, on a worker."""
        before = self._values()
        _, after = self.model.train_step(before, batch)
        for variables, *values in zip(self._variables(), before, after, strict=True):
            for variable, old, new in zip(variables, *values, strict=True):
                if new is not old:
                    variable.assign(new)

    def _variables(self) -> tuple[list[Any], ...]:
        """Returns the variables in the order that `train_step` of Keras has them."""
        model = self.model
        return (
            model.trainable_variables,
            model.non_trainable_variables,
            model.optimizer.variables,
            model.metrics_variables,
        )

    def _values(self) -> Any:
        return tuple([v.value for v in variables] for variables in self._variables())


@contextmanager
def epochs_as_one(model: Any, arguments: dict[str, Any]) -> Iterator[None]:
    """Lets a call of `fit` take all steps of an epoch at once.

    A model that was compiled with `steps_per_execution` takes as many.
    """
    before = model.steps_per_execution
    if before == 1:
        model.steps_per_execution = _count_steps(**arguments)
    try:
        yield
    finally:
        model.steps_per_execution = before


def _count_steps(
    x: Any = None,
    batch_size: int | None = None,
    steps_per_epoch: int | None = None,
    validation_split: float = 0.0,
    **_: Any,
) -> int:
    from keras.src.trainers.data_adapters import array_slicing, get_data_adapter

    steps = steps_per_epoch
    # To ask an iterator would be to take from it.
    if steps is None and not isinstance(x, Iterator):
        if validation_split:
            split: Any = array_slicing.train_validation_split((x,), validation_split)
            (x,), _ = split
        steps = get_data_adapter(x, batch_size=batch_size).num_batches
    if steps is None:
        raise ValueError(
            f"`fit` was given {type(x).__name__}, which does not tell how many batches "
            "it has, and workers are given all steps of an epoch at once. Pass "
            "`steps_per_epoch`, or compile the model with `steps_per_execution`."
        )
    return max(steps, 1)
