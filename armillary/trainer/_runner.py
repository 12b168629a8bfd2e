"""What the trainer and the evaluator share: a step, its data, a strategy, a loop."""

import contextlib
import inspect
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import jax

from armillary._checks import check_instance
from armillary.data._dataset import DistributedDataset
from armillary.data.feed._prefetch import Prefetcher
from armillary.data.sources._source import Source
from armillary.distribute._strategy import Strategy
from armillary.distribute.replica._context import get_strategy, has_strategy
from armillary.distribute.replica._gradient import accumulating
from armillary.goodput._stopwatch import Category, get_stopwatch
from armillary.state._holders import held_by
from armillary.trainer._options import LoopOptions
from armillary.typing import PyTree

# How often the device is looked at. Data that comes ends the wait at once.
_POLL_SECONDS = 0.002


@dataclass
class Run:
    """The data of a step, and what runs it: apart from the user's attributes."""

    datasets: PyTree
    options: Any
    steps_per_loop: int | None = None
    loop: Any = None  # what ran last, a `Loop` or an `AsynchronousLoop`


def make_run(
    argument: str, datasets: PyTree, options: LoopOptions | None, kind: type
) -> Run:
    """Returns what is to run over the datasets that were given as an argument."""
    if options is not None:
        fix = f"Write `options=armillary.{kind.__name__}(...)`."
        check_instance("options", options, kind, fix)
    check_datasets(argument, datasets)
    return Run(datasets, options or kind())


class StepMethod(NamedTuple):
    """A step of the user's, a function of a nest of iterators."""

    owner: Any  # from which state is reached
    fn: Callable[[Any], PyTree]
    name: str  # for messages
    strategy: Strategy
    options: LoopOptions
    exact: bool = False  # whether every example is used, in smaller steps if it must
    keep_results: bool = False

    def __call__(self, iterators: Any) -> PyTree:
        """Runs the step."""
        with accumulating(self.options.accumulate_steps, self.name):
            return self.fn(iterators)

    @property
    def is_evaluation(self) -> bool:
        """Whether it is to leave the model as it is."""
        return self.name.startswith("eval")

    @property
    def owner_name(self) -> str:
        """What messages call the owner."""
        return "the evaluator" if self.is_evaluation else "the trainer"


_recorders: dict[int, Callable[[str], None]] = {}


class RecordsReads:
    """An object that tells which of its attributes are looked at, if someone asks."""

    if not TYPE_CHECKING:  # as a type checker would take every attribute to exist

        def __getattribute__(self, name: str) -> Any:
            if _recorders and (record := _recorders.get(id(self))) is not None:
                record(name)
            return super().__getattribute__(name)


@contextlib.contextmanager
def recorded_reads(owner: Any, record: Callable[[str], None]) -> Iterator[None]:
    """Calls `record` with the name of each attribute that is read from `owner`.

    An owner that does not tell counts as one of which everything is read.
    """
    if not isinstance(owner, RecordsReads):
        record("__dict__")
    _recorders[id(owner)] = record
    try:
        yield
    finally:
        del _recorders[id(owner)]


class Runner(RecordsReads):
    """What runs a step of its own, many times."""

    @contextlib.contextmanager
    def _in_strategy(self) -> Iterator[Strategy]:
        """Enters the strategy that is in effect, or the one among the attributes."""
        own = []
        if not has_strategy():
            own = [value for _, value in held_by(self) if isinstance(value, Strategy)]
        strategy = own[0] if own else get_strategy()
        with strategy.scope() if own else contextlib.nullcontext():
            yield strategy

    def _get_run(self, attribute: str, argument: str) -> Run:
        if attribute not in vars(self):
            raise TypeError(
                f"`{type(self).__name__}.__init__` did not call that of its base "
                "class, which takes the data. Begin it with "
                f"`super().__init__({argument})`."
            )
        return vars(self)[attribute]

    def _get_method(
        self, run: Run, strategy: Strategy, name: str, *modes: bool
    ) -> StepMethod:
        """Returns a step of this object, as its options have it run."""
        if hasattr(inspect.getattr_static(self, name), "lower"):
            raise TypeError(
                f"`{type(self).__name__}.{name}` is compiled by `jit`, which takes no "
                "trainer. Remove the decorator: the loop compiles its steps."
            )
        step = getattr(self, name)
        return StepMethod(self, step, name, strategy, run.options, *modes)


def check_datasets(name: str, nest: PyTree) -> None:
    """Raises if a part of a nest can be no dataset; whether it is, shows later."""
    for each in flatten_datasets(nest)[0]:
        is_one = each is None or isinstance(each, Iterable | Callable | Source)
        if not is_one or isinstance(each, str | bytes | bytearray | dict):
            raise TypeError(
                f"`{name}` has {each!r:.80} of type {type(each).__name__}, but it must "
                "hold data sets. Use `armillary.data.from_arrays(arrays, "
                "batch_size=...)`, or an iterable of batches."
            )


def flatten_datasets(nest: PyTree) -> tuple[list[Any], Any]:
    """Flattens a nest of datasets; a list that holds arrays is one, of its batches."""
    leaves, structure = jax.tree.flatten(nest, is_leaf=_is_dataset)
    if not leaves or any(hasattr(leaf, "dtype") for leaf in leaves):
        return [nest], jax.tree.structure(0)
    return leaves, structure


def _is_dataset(value: Any) -> bool:
    if not isinstance(value, list | tuple):
        # JAX warns of iterators that it is not told to be leaves.
        return isinstance(value, Iterator)
    leaves = jax.tree.leaves(value, is_leaf=lambda part: isinstance(part, Iterator))
    return any(hasattr(leaf, "dtype") for leaf in leaves)


def distribute(dataset: Any, strategy: Strategy) -> DistributedDataset:
    """Returns a dataset of a strategy, or one that it makes of the user's data."""
    if not isinstance(dataset, DistributedDataset):
        return strategy.distribute_dataset(dataset)
    if dataset.layout != strategy.layout:
        raise ValueError(
            f"The dataset was distributed over {dataset.layout.num_replicas} replicas "
            f"by another strategy than {strategy!r}, under which the step runs. Train "
            "under its strategy (`with strategy.scope():`, or `strategy=strategy` of "
            "the `Controller` or of `predict`), or make it with "
            "`armillary.make_distributed_dataset(strategy, ...)` of the other."
        )
    return dataset


@contextlib.contextmanager
def waiting_for_data(
    queue: Prefetcher[Any] | None, strategy: Strategy
) -> Iterator[None]:
    """Counts a block that reads the first batches or the next chunk of a queue.

    Python reads ahead of the device: while that still runs steps, waiting costs
    nothing. Where this thread reads, the whole block counts if the device has ended.
    """
    stopwatch, dispatch = get_stopwatch(), strategy.dispatch
    if stopwatch is not None:
        stopwatch.moves += 1
    if stopwatch is None or (queue is not None and queue.is_ready):
        yield
        return
    while queue is not None and dispatch.in_flight():
        if not queue.is_coming(_POLL_SECONDS):
            break
    category = stopwatch.category
    with stopwatch.phase(Category.DATA):
        yield
        if dispatch.in_flight():
            stopwatch.category = category
