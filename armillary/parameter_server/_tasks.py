"""Functions and datasets on a worker, and the strategy that they run under."""

import collections
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeAlias

import jax
import numpy as np

from armillary.data._dataset import DistributedDataset
from armillary.data._layout import InputContext
from armillary.distribute.program._flat_state import FlatState
from armillary.distribute.program._step_iterator import MoreBatches, StepIterator
from armillary.distribute.replica._run_alone import run_alone
from armillary.distribute.strategies._single import SingleStrategy
from armillary.errors import OutOfRangeError
from armillary.parameter_server._program import TaskProgram, TaskSpec
from armillary.parameter_server._server import (
    ArrayType,
    Location,
    PartKey,
    join_rows,
    locations_to_read,
)
from armillary.state._holders import is_claimed
from armillary.state._lift import State
from armillary.typing import PyTree

# The batches that a function may take while it is traced on this worker, by dataset.
_offered: list[dict[int, StepIterator]] = []


class PerWorkerDataset:
    """The result of `ClusterCoordinator.create_per_worker_dataset`."""

    def __init__(self, build: Callable[[], int]) -> None:
        self._build = build

    def __iter__(self) -> "PerWorkerIterator":
        """Returns an iterator over the data from its beginning, for scheduled calls."""
        return PerWorkerIterator(self._build())


class PerWorkerIterator:
    """The iterators of all workers; `next` in a scheduled function takes a batch."""

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
        # An iterator without batches ends the trace, which is repeated with one more.
        empty = StepIterator(self._number, ())
        return next(iterators.setdefault(self._number, empty))

    get_next = __next__


@contextmanager
def offered(batches: dict[int, list[PyTree]]) -> Iterator[None]:
    """Offers batches, by dataset, to a function while it is traced."""
    iterators: dict[int, StepIterator] = {}
    for number, held in batches.items():
        iterators[number] = StepIterator(number, held)
    _offered.append(iterators)
    try:
        yield
    finally:
        _offered.pop()


class WorkerStrategy(SingleStrategy):
    """One replica, with the share of the data that its worker reads."""

    def __init__(self, index: int, num_workers: int, axis_name: str) -> None:
        super().__init__(axis_name=axis_name)
        self._context = InputContext(num_workers, index, 1)

    @property
    def input_context(self) -> InputContext:
        return self._context

    def _run(
        self, state: State | None, fn: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> PyTree:
        del state
        # The call is not a program of its own, because the effect of the whole function
        # on each variable is examined.
        return run_alone(self, fn, args, kwargs)


class _Lookahead(NamedTuple):
    """A dataset whose next batches are known before they are taken."""

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
                    "batches when they are free, so the number for one worker is "
                    "unknown: give them data that repeats (`repeat=True`), or schedule "
                    "fewer calls."
                ) from None
        return [self.held[i] for i in range(count)]


class Datasets:
    """The datasets of one worker, by number."""

    def __init__(self, strategy: WorkerStrategy) -> None:
        self._strategy = strategy
        self._found: dict[int, _Lookahead | Exception] = {}

    def make(self, number: int, find_dataset_fn: Callable[[], Any]) -> None:
        """Builds a dataset; an error is kept, and raised when the data is used."""
        strategy = self._strategy
        try:
            dataset_fn = find_dataset_fn()
            # As in TensorFlow, the function need not take the context.
            takes_context = bool(inspect.signature(dataset_fn).parameters)
            arguments = [strategy.input_context] if takes_context else []
            with strategy.scope():
                dataset = dataset_fn(*arguments)
            if not isinstance(dataset, DistributedDataset):
                dataset = strategy.distribute_dataset(dataset)
            name = dataset.source_name
            nothing_held: collections.deque[PyTree] = collections.deque()
            self._found[number] = _Lookahead(name, iter(dataset), nothing_held)
        except Exception as error:
            self._found[number] = error

    def _find(self, number: int) -> _Lookahead:
        """Returns a dataset; raises the error that its function has raised."""
        found = self._found.get(number)
        if found is None:
            raise RuntimeError(
                "A per-worker iterator was scheduled by a different "
                "`ClusterCoordinator` than the one that made it. Make a new dataset "
                "by `create_per_worker_dataset` of the coordinator that schedules."
            )
        if isinstance(found, Exception):
            raise found
        return found

    def peek(self, counts: dict[int, int]) -> dict[int, list[PyTree]]:
        """Returns the next batches of datasets, without taking them."""
        batches: dict[int, list[PyTree]] = {}
        for number, count in counts.items():
            batches[number] = self._find(number).peek(count)
        return batches

    def take(self, counts: dict[int, int]) -> dict[int, list[PyTree]]:
        """Returns the next batches, and moves past them."""
        batches = self.peek(counts)
        for number, taken in batches.items():
            for _ in taken:
                self._find(number).held.popleft()
        return batches


class PlacedTask(NamedTuple):
    """The locations of the variables that a scheduled function uses."""

    locations: dict[int, tuple[Location, ...]]
    updates: tuple[Any, ...]


NOWHERE = PlacedTask({}, ())

Changes: TypeAlias = tuple[dict[Any, dict[PartKey, Any]], dict[PartKey, Any]]
"""The gradients for parts of variables, by optimizer, and the additions to parts."""


class Dynamic:
    """A placeholder for an array that differs from call to call."""


class WorkerTask:
    """One function on this worker, with a program for each kind of arguments."""

    def __init__(
        self,
        call: tuple[Callable[..., Any], Any, Any],
        types: tuple[ArrayType, ...],
        strategy: WorkerStrategy,
    ) -> None:
        self._fn, args, kwargs = call
        self._leaves, self._tree = jax.tree.flatten((args, kwargs), is_leaf=is_claimed)
        objects = [(leaf, "") for leaf in self._leaves if is_claimed(leaf)]
        state = State([(self._fn, ""), *objects])
        self._strategy = strategy
        self._types = types
        self._flat = FlatState(state, strategy)
        # The number of batches that a call takes from each dataset, by the types of
        # its arguments.
        self._counts: dict[Any, dict[int, int]] = {}
        self._programs: dict[Any, TaskProgram] = {}
        self.placed = NOWHERE

    def trace(
        self, arrays: Sequence[Any], datasets: Datasets
    ) -> tuple[TaskProgram, dict[int, int]]:
        """Returns the program for arrays of these types, and its numbers of batches."""
        counts = self._counts.setdefault(_shapes_and_dtypes(list(arrays)), {})
        # Each trace may find that the function takes one more batch.
        while True:
            arguments = datasets.peek(counts), list(arrays)
            key = _shapes_and_dtypes(arguments)
            if key in self._programs:
                return self._programs[key], counts
            types = jax.tree.map(_as_type, arguments)
            try:
                with self._strategy.scope():
                    program = TaskProgram(self._call, self._flat, types, self._fn)
            except MoreBatches as more:
                counts[more.index] = counts.get(more.index, 0) + 1
            else:
                self._programs[key] = program

    def _call(self, batches: dict[int, list[PyTree]], arrays: list[Any]) -> PyTree:
        """Calls the function, with arrays in the places of the stand-ins."""
        remaining = iter(arrays)
        leaves: list[Any] = []
        for leaf in self._leaves:
            is_stand_in = isinstance(leaf, Dynamic)
            leaves.append(next(remaining) if is_stand_in else leaf)
        args, kwargs = self._tree.unflatten(leaves)
        with offered(batches):
            return self._fn(*args, **kwargs)

    def reads(self, spec: TaskSpec) -> dict[int, tuple[PartKey, ...]]:
        """Returns the parts that a call reads from each server."""
        reads: dict[int, list[PartKey]] = collections.defaultdict(list)
        for slot in spec.reads:
            for location in locations_to_read(self.placed.locations[slot]):
                reads[location.server].append(location.part)

        # A call that sends changes must know the version of the server at its start, so
        # it asks the server even if it reads nothing.
        for slot in (*spec.updated, *spec.additions):
            for location in self.placed.locations[slot]:
                reads.setdefault(location.server, [])
        return {server: tuple(parts) for server, parts in reads.items()}

    def join(
        self,
        spec: TaskSpec,
        reads: dict[int, tuple[PartKey, ...]],
        answers: dict[int, tuple[int, Any]],
    ) -> dict[int, Any]:
        """Returns the variables that a call reads."""
        found: dict[PartKey, np.ndarray] = {}
        for server, (_, arrays) in answers.items():
            found.update(zip(reads[server], arrays, strict=True))

        values: dict[int, Any] = {}
        for slot in spec.reads:
            whole = join_rows(self.placed.locations[slot], found)
            type_ = self._types[slot]
            # The program can use the NumPy array in place; a JAX array would be a copy.
            values[slot] = whole if type_.impl is None else type_.from_host(whole)
        return values

    def divide(
        self, spec: TaskSpec, gradients: list[list[Any]], additions: list[Any]
    ) -> dict[int, Changes]:
        """Returns the changes that a call sends to each server."""
        messages: dict[int, Changes] = {}

        def message_for(location: Location) -> Changes:
            return messages.setdefault(location.server, ({}, {}))

        of_updates = zip(spec.updates, self.placed.updates, gradients, strict=True)
        for update, key, leaves in of_updates:
            for slot, leaf in zip(update.param_slots, leaves, strict=True):
                array = np.asarray(leaf)
                for location in self.placed.locations[slot]:
                    updates, _ = message_for(location)
                    parts = updates.setdefault(key, {})
                    parts[location.part] = location.cut(array)

        for slot, leaf in zip(spec.additions, additions, strict=True):
            array = np.asarray(leaf)
            for location in self.placed.locations[slot]:
                _, added = message_for(location)
                added[location.part] = location.cut(array)
        return messages


def _shapes_and_dtypes(tree: PyTree) -> Any:
    leaves, structure = jax.tree.flatten(tree)
    return structure, tuple(map(_shape_and_dtype, leaves))


def _as_type(leaf: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(*_shape_and_dtype(leaf))


def _shape_and_dtype(leaf: Any) -> tuple[tuple[int, ...], Any]:
    """Returns the type of an argument; raises if it is a text."""
    if isinstance(leaf, str | bytes):
        raise TypeError(
            f"A scheduled function was given the result of another one that holds "
            f"{leaf!r}. Only arrays and numbers go from call to call: return those."
        )
    return np.shape(leaf), jax.dtypes.result_type(leaf)
