"""Data sets of which each worker has its own."""

import collections
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from armillary.data._dataset import DistributedDataset
from armillary.distribute.program._step_iterator import StepIterator
from armillary.errors import OutOfRangeError
from armillary.typing import PyTree

# What the function that is traced on this worker may take, by data set.
_offered: list[dict[int, StepIterator]] = []


class PerWorkerDataset:
    """What `ClusterCoordinator.create_per_worker_dataset` returns.

    Args:
        build: Has each worker build the data set anew, and returns its number.
    """

    def __init__(self, build: Callable[[], int]) -> None:
        self._build = build

    def __iter__(self) -> "PerWorkerIterator":
        """Returns an iterator to give to scheduled functions, from the beginning."""
        return PerWorkerIterator(self._build())


class PerWorkerIterator:
    """Iterators of the workers: in a scheduled function, `next` takes a batch.

    Args:
        number: The number of the data set.
    """

    def __init__(self, number: int) -> None:
        self._number = number

    def __iter__(self) -> "PerWorkerIterator":
        return self

    def __next__(self) -> PyTree:
        """Returns the next batch of the worker that runs the function.

        Raises:
            RuntimeError: Outside of a scheduled function.
        """
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


class Batches:
    """The data set of one worker, with a look ahead."""

    def __init__(self, dataset: DistributedDataset) -> None:
        self._name = dataset.source_name
        self._iterator = iter(dataset)
        self._held: collections.deque[Any] = collections.deque()

    def peek(self, count: int) -> list[PyTree]:
        """Returns the next batches, which stay the next ones.

        Raises:
            OutOfRangeError: If the data ends before.
        """
        while len(self._held) < count:
            try:
                self._held.append(next(self._iterator))
            except StopIteration:
                raise OutOfRangeError(
                    f"The data of a worker has ended ({self._name}). Workers take "
                    "batches as they are free, so none knows how many it will need: "
                    "give them data that repeats (`repeat=True`), or schedule fewer "
                    "calls."
                ) from None
        return [self._held[i] for i in range(count)]

    def drop(self, count: int) -> None:
        """Goes on behind the next batches."""
        for _ in range(count):
            self._held.popleft()


Datasets = dict[int, Batches | Exception]
"""A worker's data sets by number, or why one could not be built."""


def find_batches(datasets: Datasets, number: int) -> Batches:
    """Returns a data set of a worker, or raises why there is none."""
    found = datasets.get(number)
    if found is None:
        raise RuntimeError(
            "A per-worker iterator was scheduled by another `ClusterCoordinator` than "
            "the one that made it, whose workers do not have its data. Make the data "
            "set anew, by `create_per_worker_dataset` of the one that schedules."
        )
    if isinstance(found, Exception):
        raise found
    return found
