"""The datasets of a loop: a nest (list, dict, ...) of them, or one."""

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax

from armillary.data._dataset import DistributedDataset
from armillary.data.feed._prefetch import Prefetcher
from armillary.data.sources._source import Source
from armillary.distribute._strategy import Strategy
from armillary.goodput._stopwatch import Category, get_stopwatch
from armillary.typing import PyTree

# How often the device is looked at. Data that comes ends the wait at once.
_POLL_SECONDS = 0.002


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
