"""Training on the workers of a `ParameterServerStrategy`.

The same trainer as under any strategy: each step is scheduled on whichever worker is
free, and a loop ends when all its steps have.
"""

import itertools
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import jax

from armillary.data._dataset import DistributedDataset
from armillary.data._layout import InputContext, InputOptions
from armillary.distribute._strategy import Strategy
from armillary.distribute.replica._context import get_strategy
from armillary.errors import OutOfRangeError
from armillary.parameter_server._strategy import (
    ParameterServerStrategy,
)
from armillary.trainer._options import LoopOptions, StandardTrainerOptions
from armillary.trainer._runner import Run
from armillary.typing import Output, PyTree


class AsynchronousLoop:
    """The loop of one trainer over its datasets, on the workers of one strategy.

    Raises:
        ValueError: If an option has no meaning here.
    """

    def __init__(
        self, trainer: Any, strategy: ParameterServerStrategy, run: Run
    ) -> None:
        # Optax and Ray are imported where they are used.
        from armillary.parameter_server._coordinator import ClusterCoordinator

        _check_options(run.options)
        self._step, self._strategy = trainer.train_step, strategy
        self._datasets = run.datasets
        self._coordinator = ClusterCoordinator(strategy)
        # Workers do without datasets and loops, of this trainer and an evaluator's.
        local = (Run, DistributedDataset)
        held = [value for value in vars(trainer).values() if isinstance(value, local)]
        self._coordinator.leave_out([self, *held])
        self._iterators = jax.tree.map(self._make_iterator, run.datasets)

    def serves(self, run: Run, strategy: Strategy) -> bool:
        """Returns whether this loop can run a trainer as it is now."""
        return self._datasets is run.datasets and self._strategy is strategy

    def run(self, num_steps: int) -> int:
        """Runs steps; returns how many there was data for."""
        coordinator = self._coordinator
        coordinator.take_statistics()
        try:
            for _ in range(num_steps):
                coordinator.schedule(self._step, args=(self._iterators,))
            coordinator.join()
        except OutOfRangeError:
            coordinator.join()
        return coordinator.statistics.num_calls

    def add_staleness(self, output: Output) -> Output:
        """Returns the output of a loop, with how stale its steps were, in updates."""
        counts = self._coordinator.statistics
        if not counts.num_calls or not isinstance(output, Mapping | None):
            return output
        staleness = {
            "mean": counts.total_staleness / counts.num_calls,
            "max": counts.max_staleness,
        }
        return {**(output or {}), "staleness": staleness}

    def _make_iterator(self, dataset: Any) -> Any:
        from armillary.parameter_server._data import PerWorkerDataset

        if isinstance(dataset, PerWorkerDataset):
            return iter(dataset)
        if not isinstance(dataset, DistributedDataset):
            dataset = self._strategy.distribute_dataset(dataset)
        if dataset.dataset_fn is not None:
            make = partial(_from_function, dataset.dataset_fn, dataset.options)
        else:
            make = partial(_from_source, dataset.source, dataset.options)
        return iter(self._coordinator.create_per_worker_dataset(make))


def _from_function(dataset_fn: Any, options: InputOptions) -> DistributedDataset:
    return get_strategy().distribute_datasets_from_function(dataset_fn, options)


def _from_source(
    source: Any, options: InputOptions, context: InputContext
) -> DistributedDataset:
    strategy = get_strategy()
    share = Share(strategy.distribute_dataset(source), context)
    return strategy.distribute_dataset(share, options)


class Share:
    """A worker's share of batches that are the same on all workers.

    It takes each batch whose number, modulo the number of workers, is its own.
    """

    def __init__(self, dataset: DistributedDataset, context: InputContext) -> None:
        self._dataset, self._context = dataset, context

    def __iter__(self) -> Iterator[PyTree]:
        """Returns the batches of one pass."""
        start, step = self._context.input_pipeline_id, self._context.num_input_pipelines
        return itertools.islice(self._dataset.global_batches(0), start, None, step)


def _check_options(options: LoopOptions) -> None:
    default = StandardTrainerOptions()
    for name in (
        "on_non_finite",
        "check_replicas_every",
        "accumulate_steps",
        "compile_hooks",
    ):
        value = getattr(options, name)
        if value != getattr(default, name):
            raise ValueError(
                f"`{name}` of `StandardTrainerOptions` is {value!r}, which has no "
                "meaning under `ParameterServerStrategy`: workers run single steps, "
                "and do not wait for each other. Leave it out."
            )
