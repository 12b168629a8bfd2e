"""The loop of a trainer under `ParameterServerStrategy`: single steps on workers."""

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
from armillary.parameter_server._strategy import ParameterServerStrategy
from armillary.trainer._no_data import NoBatches
from armillary.trainer._options import LoopOptions, StandardTrainerOptions
from armillary.trainer._setup import Setup
from armillary.trainer._step_method import check_step_signature
from armillary.typing import Output, PyTree


class AsynchronousLoop:
    """The loop of one trainer over its datasets, on the workers of one strategy."""

    def __init__(
        self, trainer: Any, strategy: ParameterServerStrategy, setup: Setup
    ) -> None:
        # Optax and Ray are imported where they are used.
        from armillary.parameter_server._coordinator import ClusterCoordinator

        _check_options(setup.options)
        check_step_signature(trainer.train_step, type(trainer).__name__)
        self._step = trainer.train_step
        self._strategy = strategy
        self._datasets = setup.datasets
        self._coordinator = ClusterCoordinator(strategy)
        # Workers do not need the datasets and loops of the trainer, or of an evaluator
        # that it holds.
        local = (Setup, DistributedDataset)
        held = [value for value in vars(trainer).values() if isinstance(value, local)]
        self._coordinator.leave_out([self, *held])
        self._iterators = jax.tree.map(self._make_iterator, setup.datasets)
        if setup.datasets is None:
            self._iterators = NoBatches("train_dataset", self._step.__name__)

    def serves(self, setup: Setup, strategy: Strategy) -> bool:
        return self._datasets is setup.datasets and self._strategy is strategy

    def run(self, num_steps: int) -> int:
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
        """Returns the output of a loop with the staleness of its steps, in updates."""
        counts = self._coordinator.statistics
        if not counts.num_calls or not isinstance(output, Mapping | None):
            return output
        staleness = {
            "mean": counts.total_staleness / counts.num_calls,
            "max": counts.max_staleness,
        }
        return {**(output or {}), "staleness": staleness}

    def _make_iterator(self, dataset: Any) -> Any:
        from armillary.parameter_server._tasks import PerWorkerDataset

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
    """Returns a worker's share of batches that are the same on all workers."""
    strategy = get_strategy()
    dataset = strategy.distribute_dataset(source)
    start = context.input_pipeline_id
    step = context.num_input_pipelines

    def read_share() -> Iterator[PyTree]:
        return itertools.islice(dataset.global_batches(0), start, None, step)

    return strategy.distribute_dataset(read_share, options)


def _check_options(options: LoopOptions) -> None:
    for name in (
        "on_non_finite",
        "check_replicas_every",
        "accumulate_steps",
        "compile_hooks",
        "read_ahead",
    ):
        value = getattr(options, name)
        if value != getattr(StandardTrainerOptions, name):
            raise ValueError(
                f"`{name}` of `StandardTrainerOptions` is {value!r}, but it does not "
                "work under `ParameterServerStrategy`, where workers run single steps "
                "and do not wait for each other. Leave it out."
            )
