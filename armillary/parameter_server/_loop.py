"""The loop of a trainer under `ParameterServerStrategy`: single steps on workers."""

import contextlib
import itertools
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

import jax

from armillary.data._dataset import DistributedDataset
from armillary.data._layout import InputContext, InputOptions
from armillary.distribute.replica._context import get_strategy
from armillary.errors import OutOfRangeError
from armillary.typing import Output, PyTree

if TYPE_CHECKING:
    from armillary.parameter_server._strategy import ParameterServerStrategy

# The options of a trainer that do not work on workers.
_UNUSABLE = (
    *("on_non_finite", "check_replicas_every", "accumulate_steps"),
    *("compile_hooks", "read_ahead"),
)


class AsynchronousLoop:
    """The loop of one step over its datasets, on the workers of one strategy.

    Args:
        step: A trainer's step, which takes an iterator.
        strategy: The strategy.
        datasets: The nest of datasets, or `None`.
        iterators: The iterator to pass to the step if there are no datasets.
        left_out: Objects of the trainer that workers do not need.
    """

    def __init__(
        self,
        step: Callable[[Any], Any],
        strategy: "ParameterServerStrategy",
        datasets: PyTree,
        *,
        iterators: Any,
        left_out: Collection[Any],
    ) -> None:
        # Optax and Ray are imported where they are used.
        from armillary.parameter_server._coordinator import ClusterCoordinator

        self._step = step
        self._strategy = strategy
        self._datasets = datasets
        self._coordinator = ClusterCoordinator(strategy)
        self._coordinator.leave_out([self, *left_out])
        self._iterators = iterators
        if datasets is not None:
            self._iterators = jax.tree.map(self._make_iterator, datasets)

    @staticmethod
    def check_options(options: Any, defaults: Any) -> None:
        """Raises if a trainer has options that do not work on workers."""
        for name in _UNUSABLE:
            value = getattr(options, name)
            if value != getattr(defaults, name):
                raise ValueError(
                    f"`{name}` of `StandardTrainerOptions` is {value!r}, but it does "
                    "not work under `ParameterServerStrategy`, where workers run "
                    "single steps and do not wait for each other. Leave it out."
                )

    @staticmethod
    def begin_epoch(epochs: int) -> NoReturn:
        raise ValueError(
            f"`epochs` is {epochs}, but workers of a `ParameterServerStrategy` read "
            "data of their own at different speeds. Train up to a step "
            "(`controller.train(steps)`)."
        )

    def serves(self, datasets: PyTree, strategy: "ParameterServerStrategy") -> bool:
        # `shutdown` ends the coordinator of this loop; the next loop makes another one.
        is_up = strategy.coordinator is self._coordinator
        is_same = self._datasets is datasets and self._strategy is strategy
        return is_same and is_up

    def run(self, num_steps: int) -> int:
        coordinator = self._coordinator
        coordinator.take_statistics()
        # A worker whose data has ended raises this error.
        with contextlib.suppress(OutOfRangeError), coordinator.joining():
            for _ in range(num_steps):
                coordinator.schedule(self._step, args=(self._iterators,))
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
