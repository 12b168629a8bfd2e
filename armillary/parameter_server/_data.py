"""Data sets of which each worker has its own.

The strategy that a scheduled function finds on its worker.
"""

import collections
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import jax

from armillary._jaxpr import mark
from armillary.data._dataset import DistributedDataset
from armillary.data._layout import InputContext
from armillary.distribute.program._trace import StepIterator
from armillary.distribute.replica._alone import run_in_place
from armillary.distribute.replica._collectives import ReplicaContext
from armillary.distribute.replica._context import entered
from armillary.distribute.replica._differences import BY_OPS
from armillary.distribute.replica._values import ReduceOp
from armillary.distribute.strategies._single import SingleStrategy
from armillary.errors import OutOfRangeError, ReplicaContextError
from armillary.state._lift import State
from armillary.typing import PyTree


class WorkerStrategy(SingleStrategy):
    """One replica: on its own, or of as many as there are workers."""

    def __init__(self, index: int, num_workers: int, *, is_synchronous: bool) -> None:
        super().__init__()
        self._index, self._num_workers = index, num_workers
        if is_synchronous:
            self._num_replicas = num_workers

    def _run(
        self, state: State | None, fn: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> PyTree:
        del state
        # Not as a call of its own: what it does to each variable is looked at.
        if self._num_replicas == 1:
            context = ReplicaContext(self, None, active=1)
            return run_in_place(self, context, fn, args, kwargs)
        with entered(self, _WorkerContext(self, self._index)):
            try:
                return fn(*args, **kwargs)
            except NameError as error:
                if "unbound axis name" not in str(error):
                    raise
                raise ReplicaContextError(alone_message("a collective")) from error

    @property
    def input_context(self) -> InputContext:
        """Which worker reads the data, of how many."""
        return InputContext(self._num_workers, self._index, self.num_replicas_in_sync)


SENT = {ReduceOp.SUM: BY_OPS % "sum", ReduceOp.MEAN: BY_OPS % "mean"}
"""Names what the servers are to add up, and nothing else may use."""


class _WorkerContext(ReplicaContext):
    """A replica whose gradients are summed on the parameter servers."""

    def __init__(self, strategy: WorkerStrategy, index: int) -> None:
        super().__init__(strategy, None, active=strategy.num_replicas_in_sync)
        self._index = index

    @property
    def replica_id_in_sync_group(self) -> Any:
        return self._index

    def all_reduce(
        self, reduce_op: ReduceOp | str, value: PyTree, *, dtype: Any = None
    ) -> PyTree:
        """Returns gradients as the servers are to add them up."""
        del dtype
        op = ReduceOp.of(reduce_op)
        if op not in SENT:
            raise ReplicaContextError(alone_message("all_reduce"))
        count = self.num_replicas_in_sync if op is ReduceOp.MEAN else 1

        def send(leaf: Any) -> Any:
            return mark(leaf if count == 1 else leaf / count, SENT[op])

        return jax.tree.map(send, value)

    def all_gather(self, *_: Any, **__: Any) -> PyTree:
        raise ReplicaContextError(alone_message("all_gather"))

    def merge_call(self, *_: Any, **__: Any) -> PyTree:
        raise ReplicaContextError(alone_message("merge_call"))


def alone_message(method: str) -> str:
    """Returns the message for what needs to hear from the other workers."""
    return (
        f"`{method}` was called under `ParameterServerStrategy(max_staleness=0)`. Its "
        "workers hear nothing from each other within a step: gradients, metrics and "
        "batch statistics are summed on the parameter servers. Give what `all_reduce` "
        "returns to the optimizer as it is (no `all_reduce_gradients` in its chain), "
        "return other values, or add them to a metric."
    )


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
