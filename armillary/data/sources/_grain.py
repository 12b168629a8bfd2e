"""Datasets and loaders of Grain, and their examples by number.

If batching is the last operation of a `MapDataset`, its examples before that have
numbers. Then a process of several reads only the examples of its own devices.
"""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from armillary.data.sources._arrays import IndexedIterator
from armillary.data.sources._random_access import RandomAccessDataset
from armillary.data.sources._source import IterableSource, is_kind
from armillary.errors import DatasetStateError
from armillary.typing import Batch

_BATCH_FUNCTIONS = ("make_batch", "_MakeBatchParallel")
"""The functions of Grain that stack examples."""
_MAX_COMPARED = 1024
"""A fingerprint reads some of so many examples, because a dataset may have no end."""
_NUM_THREADS = 16
"""The number of threads with which Grain iterates over a `MapDataset`."""


def from_grain(dataset: Any, kind: str) -> IterableSource:
    """Returns a source of the batches of a dataset or loader of Grain."""
    made = IterableSource(
        lambda epoch: iter(dataset),
        f"grain.{kind}",
        # Batches that Grain makes are new arrays, but a later `map` may reuse a buffer.
        copies=not _ends_in_batches(dataset),
    )
    if kind == "DataLoader":  # It saves its order, and Grain compares it.
        return made
    made.order_of_examples = _find_order(dataset)
    batches, num_threads = _find_batches(dataset)
    if batches is not None:
        make_rows = functools.partial(GrainRows, batches, made, num_threads)
        made.by_number = functools.cache(make_rows)
    return made


def _ends_in_batches(dataset: Any) -> bool:
    """Returns whether batching is the last operation in a Grain dataset."""
    node = dataset
    while "Prefetch" in type(node).__name__ and node.parents:
        node = node.parents[0]
    # A loader has a list of operations. A dataset is an operation itself.
    operations = getattr(node, "_operations", ())
    last = operations[-1] if operations else node
    kind = type(last)
    # The user may have given the function that makes a batch.
    made_by = getattr(last, "_batch_fn", last)
    module = getattr(made_by, "__module__", None) or "grain"
    is_of_grain = kind.__module__.startswith("grain") and module.startswith("grain")
    return "Batch" in kind.__name__ and is_of_grain


def _find_order(dataset: Any) -> dict[str, list[int]]:
    """Returns the values that give a position its meaning; Grain does not save them."""
    seeds: list[int] = []
    batch_sizes: list[int] = []
    counts: list[int] = []
    nodes = [dataset]
    for node in nodes:  # The list grows by the parents of each node.
        parents = getattr(node, "parents", ())
        nodes.extend(parents)
        if "Shuffle" in type(node).__name__:
            seeds.append(node._seed)
        if not is_kind(node, "grain", "MapDataset"):
            continue
        if hasattr(node, "_batch_size"):
            batch_sizes.append(node._batch_size)
        if not parents:
            counts.append(len(node))
    return {"shuffle seed": seeds, "batch size": batch_sizes, "examples": counts}


def _find_batches(dataset: Any) -> tuple[Any, int]:
    """Returns the `MapDataset` that stacks batches, if any, and a number of threads."""
    node = dataset
    num_threads = _NUM_THREADS
    if type(node).__name__ == "PrefetchIterDataset":  # Made by `to_iter_dataset`.
        num_threads = max(1, node._read_options.num_threads)
        (node,) = node.parents
    if not is_kind(node, "grain", "MapDataset"):
        return None, num_threads
    if type(node).__name__ != "BatchMapDataset":
        return None, num_threads

    function = node._batch_fn
    name = getattr(function, "__name__", type(function).__name__)
    module = getattr(function, "__module__", None) or ""
    stacks = module.startswith("grain") and name in _BATCH_FUNCTIONS
    has_examples = len(node) > 0
    return (node if stacks and has_examples else None), num_threads


class GrainRows(RandomAccessDataset):
    """The examples of a `MapDataset` before it makes batches of them."""

    argument = "dataset"

    def __init__(self, batches: Any, source: IterableSource, num_threads: int) -> None:
        self._grain_order = source.order_of_examples
        (examples,) = batches.parents
        options = (batches._batch_size, None, False, batches._drop_remainder)
        super().__init__(examples, *options, num_threads=num_threads)
        self.name = source.name

    def _count(self, source: Any) -> int:
        return len(source)

    def spaced_rows(self, count: int) -> np.ndarray:
        num_examples = min(self.num_examples, _MAX_COMPARED)
        count = min(count, num_examples)
        return np.linspace(0, num_examples - 1, count).astype(int)

    def fingerprints(self) -> dict[str, Any]:
        """Returns the order of Grain, and a checksum of some of the first examples."""
        return {**self._grain_order, **super().fingerprints()}

    def iterate(
        self, epoch: int, read_rows: Callable[[np.ndarray], Batch]
    ) -> IndexedIterator:
        return _GrainIterator(self, epoch, read_rows)


class _GrainIterator(IndexedIterator):
    """Yields batches with the positions of Grain, which count batches."""

    def get_state(self) -> dict[str, int]:
        _, index = self._place
        num_batches = -(-index // self._dataset.batch_size)  # rounded up
        return {"next_index": num_batches}

    def set_state(self, state: dict[str, Any]) -> None:
        batch_size = self._dataset.batch_size
        num_examples = self._dataset.num_examples
        index = state["next_index"] * batch_size
        # After the last batch, which may be smaller, the index is past the end.
        is_inside = 0 <= index < num_examples + batch_size
        if not is_inside:
            raise DatasetStateError(
                f"`state` is {state!r}, which is not a place in {num_examples} "
                f"examples in batches of {batch_size}. Pass the data that it was saved "
                "with."
            )
        self._go_to(0, min(index, num_examples))
