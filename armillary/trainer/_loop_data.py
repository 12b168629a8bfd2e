"""The data of a loop: a nest of datasets, read as one chunk of batches after another.

The first batches are only looked at. What a step takes of them shows when it is traced,
and then chunks of many steps can be built.

Takes the batches of one step out of a chunk, inside a program.

A compiler that merges this with the step's own arithmetic may round differently for
chunks of another size (one step is enough), and where rows come from arrays that stay
on the device. So the step is compiled apart from it, and gets the same bits from all.

The time in which a loop waits for data, apart from that of its steps.

Python reads ahead of the device. While the device still runs steps, waiting for the
next ones costs nothing: only what remains after their end is counted as waiting.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from armillary.data._dataset import DistributedDataset
from armillary.data._layout import Active
from armillary.data.feed._chunks import Chunk, ChunkBuilder
from armillary.data.feed._feed import Feed
from armillary.data.feed._position import Position
from armillary.data.sources._source import Source
from armillary.distribute._strategy import Strategy
from armillary.goodput._stopwatch import Category, get_stopwatch
from armillary.trainer._options import LoopOptions
from armillary.trainer._step_checks import StepMethod
from armillary.typing import PyTree

Gather = Callable[[PyTree, PyTree], PyTree]
"""`armillary.data.feed._gather.Gather.on_device`."""


def take_batches(
    inputs: Sequence[tuple[PyTree, PyTree]],
    batches_per_step: Sequence[int],
    gathers: Sequence[Gather],
    index: Any,
) -> list[Any]:
    """Returns the leaves of the batches of one step of `Chunk.inputs`, in order."""

    def take(index: Any) -> list[Any]:
        return jax.tree.leaves(
            [
                [
                    gather(resident, _take_batch(arrays, index * count + offset))
                    for offset in range(count)
                ]
                for (arrays, resident), count, gather in zip(
                    inputs, batches_per_step, gathers, strict=True
                )
            ]
        )

    return jax.lax.platform_dependent(
        index,
        cpu=lambda index: _take_in_branch(take, index),
        default=lambda index: jax.lax.optimization_barrier(take(index)),
    )


def _take_in_branch(take: Callable[[Any], list[Any]], index: Any) -> list[Any]:
    # XLA's CPU compiler drops barriers before it merges operations, but it keeps a
    # branch whose condition it cannot know. The other one is never taken; being made
    # of the same operations, it leaves the arrays split over devices as they are.
    return jax.lax.cond(
        index >= 0, take, lambda index: take(jnp.zeros_like(index)), index
    )


def _take_batch(arrays: PyTree, index: Any) -> PyTree:
    return jax.tree.map(
        lambda leaf: jax.lax.dynamic_index_in_dim(leaf, index, keepdims=False), arrays
    )


# How often the device is looked at. Data that comes ends the wait at once.
_POLL_SECONDS = 0.002


@contextlib.contextmanager
def waiting_for_data(feed: Feed[Any], strategy: Strategy) -> Iterator[None]:
    """Counts a block that reads the first batches or the next chunk from a feed.

    Where this thread reads it, the whole block counts as waiting if the device has
    ended before it.
    """
    stopwatch, dispatch = get_stopwatch(), strategy.dispatch
    if stopwatch is not None:
        stopwatch.moves += 1
    if stopwatch is None or feed.is_ready:
        yield
        return
    while dispatch.in_flight() and feed.is_coming(_POLL_SECONDS):
        pass
    category = stopwatch.category
    with stopwatch.phase(Category.DATA):
        yield
        if dispatch.in_flight():
            stopwatch.category = category


# Programs shorter than this cost more to start than to run, where steps are small.
FEW_STEPS = 20
# More steps than this gain nothing.
_MANY_STEPS = 100


def choose_chunk_size(num_steps: int) -> int:
    """Returns how many steps a chunk has, for loops of so many."""
    several = max(FEW_STEPS // num_steps, 1) * num_steps
    return min(several, _MANY_STEPS)


class LoopData:
    """Reads the data of one step from a nest (list, dict, ...) of datasets, or one.

    `exact` uses every example, in smaller steps where needed.

    Attributes:
        datasets: The datasets, without the structure of their nest.
        structure: That structure.
        feed: Reads them; a new one for each pass that begins anew.
        batches_per_step: How many batches of each a step takes, once `start` was told.
    """

    def __init__(
        self, nest: PyTree, method: StepMethod, options: LoopOptions, *, exact: bool
    ) -> None:
        self.nest = nest
        datasets, self.structure = flatten_datasets(nest)
        self._strategy, self._name = method.strategy, method.name
        self.datasets = [distribute(data, self._strategy) for data in datasets]
        self._exact = exact
        self._steps_per_chunk = options.steps_per_chunk
        self._max_chunk_bytes = options.max_chunk_bytes
        self.batches_per_step: tuple[int, ...] = ()
        self.feed = self._open_feed(begins_anew=exact)

    def _open_feed(self, *, begins_anew: bool) -> Feed[Chunk]:
        return Feed(
            self.datasets, exact=self._exact, begins_anew=begins_anew, name=self._name
        )

    @property
    def is_closed(self) -> bool:
        """Whether nothing can be read any more, also not by `reopen`."""
        return self.feed.is_closed and not self._exact

    def reopen(self) -> None:
        """Begins a new pass over the datasets."""
        self.feed.close()
        self.feed = self._open_feed(begins_anew=True)

    def begin_epoch(self, epochs: int) -> int:
        """Begins the next pass, if the last one has ended; see `AbstractTrainer`."""
        if len(self.datasets) > 1:
            raise ValueError(
                f"`epochs` is {epochs}, but the trainer has {len(self.datasets)} "
                "datasets, whose passes end at different steps. Train up to a step, "
                "and let the data repeat itself."
            )
        if self.datasets[0].is_endless:
            raise ValueError(
                f"`epochs` is {epochs}, but `train_dataset` repeats its data for ever, "
                "so that a pass over it never ends. Make it without `repeat=True`, or "
                "train up to a step."
            )
        (position,) = self.feed.positions
        num_done = position.epoch + position.is_exhausted
        if num_done >= epochs:
            return 0
        if position.is_exhausted:
            self.reopen()
        return num_done + 1

    def set_chunk_size(self, num_steps: int) -> None:
        """Decides, once, how many steps a chunk has: other sizes are other programs.

        As many as a loop that nothing shortens, or as several such loops.
        """
        if self._steps_per_chunk is None:
            self._steps_per_chunk = choose_chunk_size(num_steps)

    def peek(self) -> tuple[list[PyTree], tuple[Active, ...]] | None:
        """Looks at the first batches, before `start`; `None` if one is lacking.

        Returns shape and dtype of one of each dataset, and which replicas hold data.
        """
        with waiting_for_data(self.feed, self._strategy):
            batches = self.feed.peek()
        if None in batches:
            return None
        pairs = zip(self.feed.readers, batches, strict=True)
        types = [reader.gather.types(batch) for reader, batch in pairs if batch]
        return types, tuple(batch.num_active for batch in batches if batch)

    def start(self, batches_per_step: tuple[int, ...]) -> None:
        """Makes chunks from here on, for steps that take so many batches."""
        assert self._steps_per_chunk is not None
        self.batches_per_step = batches_per_step
        builder = ChunkBuilder(
            batches_per_step,
            steps_per_chunk=self._steps_per_chunk,
            max_chunk_bytes=self._max_chunk_bytes,
            # Nothing runs in one process alone: the others must hear of it instead.
            gives_errors_at_once=self.datasets[0].layout.peers is not None,
        )
        prefetch = min(1, *(dataset.prefetch for dataset in self.datasets))
        self.feed.start(builder.build, prefetch)

    def next_chunk(self) -> Chunk | None:
        """Returns the chunk that holds the next step, or `None` at the end."""
        feed = self.feed
        if feed.chunk is not None:
            return feed.chunk
        with waiting_for_data(feed, self._strategy):
            chunk = feed.next_chunk()
        if self._strategy.dispatch.in_flight():
            feed.read_on()
        return chunk

    def rewind(self, positions: Sequence[Position]) -> None:
        """Goes back to positions that were read since the data was last moved."""
        if self.feed.is_repositionable:
            self.feed.seek(positions)

    def batch_paths(self, chunk: Chunk) -> list[str]:
        """Returns a path for each array of the batches of one step."""
        return [
            jax.tree_util.keystr(path[1:], simple=True, separator="/") or "values"
            for count, types in zip(self.batches_per_step, chunk.types, strict=True)
            for path, _ in jax.tree_util.tree_leaves_with_path([types] * count)
        ]


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
