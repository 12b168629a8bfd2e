"""`fit` of a Keras model on the workers of a `ParameterServerStrategy`.

Keras runs its own loop over epochs and callbacks in this process. In that loop it calls
`model.train_function`, which takes some steps and returns the logs. Here that function
schedules the steps on workers, and returns when all of them have ended.
"""

import itertools
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import wait
from contextlib import contextmanager
from functools import partial
from typing import Any

import jax
import numpy as np

from armillary.data._dataset import DistributedDataset
from armillary.data._layout import InputContext, InputOptions
from armillary.distribute.replica._context import get_strategy, without_strategy
from armillary.keras._trainer import as_keras_tensors
from armillary.keras._values import set_value
from armillary.parameter_server._closures import RemoteValue
from armillary.parameter_server._coordinator import ClusterCoordinator
from armillary.parameter_server._strategy import ParameterServerStrategy
from armillary.parameter_server._tasks import PerWorkerIterator
from armillary.state._slots import Trait, with_trait

# Batches that may wait for each worker. A worker must not run out of batches, but they
# need memory.
_BATCHES_AHEAD = 4
# Steps of each worker between two waits for all of them, if the data has no length.
_STEPS_BETWEEN_WAITS = 32

Values = tuple[list[Any], ...]


@with_trait(Trait.HOLDS_STATE)
class ModelStep:
    """One training step of a Keras model, as a worker runs it."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def take(self, batch: Any) -> None:
        """Takes a step with a batch that this process has sent."""
        before = self.values()
        # As under all strategies, the model sees its batch as the only replica.
        with without_strategy():
            _, after = self.model.train_step(before, batch)

        for variables, old_values, new_values in zip(
            self.variables(), before, after, strict=True
        ):
            for variable, old, new in zip(
                variables, old_values, new_values, strict=True
            ):
                if new is not old:
                    variable.assign(new)

    def take_next(self, iterator: Iterator[Any]) -> None:
        """Takes a step with the next batch of the worker."""
        self.take(next(iterator))

    def variables(self) -> tuple[list[Any], ...]:
        """Returns the variables, in the order of the state of Keras' `train_step`."""
        model = self.model
        return (
            model.trainable_variables,
            model.non_trainable_variables,
            model.optimizer.variables,
            model.metrics_variables,
        )

    def values(self) -> Values:
        """Returns the values of the variables, in the same order."""
        return tuple(
            [variable.value for variable in variables] for variables in self.variables()
        )


class ScheduledSteps:
    """Takes the steps of `fit` on workers, in place of Keras' compiled function."""

    def __init__(self, model: Any, strategy: ParameterServerStrategy) -> None:
        self.strategy = strategy
        self.iterator: Any = None
        """The iterator over the epochs of the running `fit`, once Keras has made it."""
        self._step = ModelStep(model)
        self._most_begun = _BATCHES_AHEAD * strategy.num_workers
        self._is_starting = False

    @property
    def _coordinator(self) -> ClusterCoordinator:
        """The coordinator of the strategy; another one after `shutdown`."""
        return ClusterCoordinator(self.strategy)

    @contextmanager
    def fitting(self) -> Iterator[None]:
        """Expects the iterator that Keras makes at the beginning of `fit`."""
        self._is_starting = True
        try:
            yield
        finally:
            self._is_starting = False
            self.iterator = None

    def take_over(self, options: dict[str, Any]) -> dict[str, Any]:
        """Makes one call take the steps of a whole epoch; returns options of a build.

        Args:
            options: The arguments of `_symbolic_build`. The first one of a `fit`
                gets the iterator over its epochs.
        """
        if not self._is_starting:
            return options

        self._is_starting = False
        iterator = self.iterator = options["iterator"]
        iterator.armillary_is_for_workers = True
        # A number other than 1 comes from `compile(steps_per_execution=)`, and stays.
        if iterator.steps_per_execution == 1:
            longest = _STEPS_BETWEEN_WAITS * self.strategy.num_workers
            iterator.steps_per_execution = iterator.num_batches or longest

        spec = getattr(iterator.data_adapter, "spec", None)
        return options if spec is None else {"data_batch": spec}

    def __call__(self, state: Values, batches: Iterator[Any]) -> tuple[Any, Values]:
        """Takes the next steps, and returns when all of them have ended."""
        # Keras ends the epoch if there is no batch at all.
        first = next(batches)
        self._write(state)

        num_steps = 1 if self.iterator is None else self.iterator.steps_per_execution
        taken = itertools.islice(itertools.chain([first], batches), num_steps)
        begun: deque[RemoteValue] = deque()
        with self._coordinator.joining():
            for batch in taken:
                begun.append(self._schedule(batch))
                if len(begun) > self._most_begun:
                    oldest = begun.popleft()
                    wait([oldest.future])

        return dict(self._step.model.get_metrics_result()), self._step.values()

    def _schedule(self, batch: Any) -> RemoteValue:
        if isinstance(batch, PerWorkerIterator):
            return self._coordinator.schedule(self._step.take_next, args=(batch,))
        arrays = jax.tree.map(np.asarray, batch)
        return self._coordinator.schedule(self._step.take, args=(arrays,))

    def _write(self, state: Values) -> None:
        """Writes the values back to the variables; Keras takes them during an epoch."""
        for variables, values in zip(self._step.variables(), state, strict=True):
            for variable, value in zip(variables, values, strict=True):
                set_value(variable, value)


def make_worker_data(
    dataset_fn: Callable[[InputContext], Any],
    options: InputOptions | None,
    strategy: ParameterServerStrategy,
) -> Any:
    """Returns an adapter for Keras, if each worker reads data of its own.

    Args:
        dataset_fn: Called on each worker, and once here, because Keras builds a model
            by the shapes of a batch.
        options: The treatment of batches on each worker.
        strategy: The strategy of the workers.
    """
    from keras.src.trainers.data_adapters import data_adapter

    context = InputContext(strategy.num_workers)
    dataset = strategy.distribute_dataset(dataset_fn(context), options)
    types = as_keras_tensors(dataset.element_spec)
    make = partial(_distribute_here, dataset_fn, options)
    per_worker = ClusterCoordinator(strategy).create_per_worker_dataset(make)
    base: Any = data_adapter.DataAdapter

    class WorkerData(base):
        """Yields the name of the workers' iterators for each step, and no batches."""

        spec = types
        num_batches = None
        batch_size = None
        partial_batch_size = None
        has_partial_batch = None

        def __init__(self) -> None:
            self._iterator = iter(per_worker)

        def get_jax_iterator(self) -> Iterator[PerWorkerIterator]:
            return itertools.repeat(self._iterator)

    return WorkerData()


def _distribute_here(
    dataset_fn: Callable[[InputContext], Any], options: InputOptions | None
) -> DistributedDataset:
    return get_strategy().distribute_datasets_from_function(dataset_fn, options)
