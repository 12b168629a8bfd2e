"""Data sets of which each worker has its own, and the strategy that it runs under."""

import collections
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from armillary.data._dataset import DistributedDataset
from armillary.data._layout import InputContext
from armillary.distribute.program._trace import StepIterator
from armillary.distribute.replica._run import run_alone
from armillary.distribute.strategies._single import SingleStrategy
from armillary.errors import OutOfRangeError
from armillary.state._lift import State
from armillary.typing import PyTree

# What the function that is traced on this worker may take, by data set.
_offered: list[dict[int, StepIterator]] = []


class PerWorkerDataset:
    """What `ClusterCoordinator.create_per_worker_dataset` returns."""

    def __init__(self, build: Callable[[], int]) -> None:
        self._build = build

    def __iter__(self) -> "PerWorkerIterator":
        """Returns an iterator to give to scheduled functions, from the beginning."""
        return PerWorkerIterator(self._build())


class PerWorkerIterator:
    """Iterators of the workers: in a scheduled function, `next` takes a batch."""

    def __init__(self, number: int) -> None:
        self._number = number

    def __iter__(self) -> "PerWorkerIterator":
        return self

    def __next__(self) -> PyTree:
        """Returns the next batch of the worker that runs the function."""
        if not _offered:
            raise RuntimeError(
                "`next` was called on a per-worker iterator outside of a scheduled "
                "function. Its data is on the workers: pass the iterator in `args` of "
                "`ClusterCoordinator.schedule`, and call `next` in the function."
            )
        iterators = _offered[-1]
        return next(iterators.setdefault(self._number, StepIterator(self._number, ())))

    get_next = __next__


@contextmanager
def offered(batches: dict[int, list[PyTree]]) -> Iterator[None]:
    """Lets a function take batches, by data set, while it is traced."""
    _offered.append(
        {number: StepIterator(number, held) for number, held in batches.items()}
    )
    try:
        yield
    finally:
        _offered.pop()


class WorkerStrategy(SingleStrategy):
    """One replica, which knows what share of the data is its worker's."""

    def __init__(self, index: int, num_workers: int) -> None:
        super().__init__()
        self._context = InputContext(num_workers, index, 1)

    @property
    def input_context(self) -> InputContext:
        """Which worker reads the data, of how many."""
        return self._context

    def _run(
        self, state: State | None, fn: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> PyTree:
        del state
        # Not as a call of its own: what it does to each variable is looked at.
        return run_alone(self, fn, args, kwargs)


class _Ahead(NamedTuple):
    """A data set whose next batches are known before they are taken."""

    name: str
    iterator: Iterator[PyTree]
    held: collections.deque[PyTree]

    def peek(self, count: int) -> list[PyTree]:
        """Returns the next batches, which stay the next ones."""
        while len(self.held) < count:
            try:
                self.held.append(next(self.iterator))
            except StopIteration:
                raise OutOfRangeError(
                    f"The data of a worker has ended ({self.name}). Workers take "
                    "batches as they are free, so none knows how many it will need: "
                    "give them data that repeats (`repeat=True`), or schedule fewer "
                    "calls."
                ) from None
        return [self.held[i] for i in range(count)]


class Datasets:
    """The data sets of one worker, by number."""

    def __init__(self, strategy: WorkerStrategy) -> None:
        self._strategy = strategy
        self._found: dict[int, _Ahead | Exception] = {}

    def make(self, number: int, find_dataset_fn: Callable[[], Any]) -> None:
        """Builds a data set; what is wrong is told when it is used."""
        strategy = self._strategy
        try:
            dataset_fn = find_dataset_fn()
            with strategy.scope():
                # As in TensorFlow, it may do without.
                takes_context = bool(inspect.signature(dataset_fn).parameters)
                dataset = dataset_fn(*[strategy.input_context] * takes_context)
            if not isinstance(dataset, DistributedDataset):
                dataset = strategy.distribute_dataset(dataset)
            ahead = _Ahead(dataset.source_name, iter(dataset), collections.deque())
            self._found[number] = ahead
        except Exception as error:
            self._found[number] = error

    def _find(self, number: int) -> _Ahead:
        found = self._found.get(number)
        if found is None:
            raise RuntimeError(
                "A per-worker iterator was scheduled by another `ClusterCoordinator` "
                "than the one that made it. Make the data set anew, by "
                "`create_per_worker_dataset` of the one that schedules."
            )
        if isinstance(found, Exception):
            raise found
        return found

    def peek(self, counts: dict[int, int]) -> dict[int, list[PyTree]]:
        """Returns the next batches, as many as are asked for of each data set."""
        return {number: self._find(number).peek(n) for number, n in counts.items()}

    def take(self, counts: dict[int, int]) -> dict[int, list[PyTree]]:
        """Returns the next batches, and goes on behind them."""
        batches = self.peek(counts)
        for number, taken in batches.items():
            for _ in taken:
                self._find(number).held.popleft()
        return batches
