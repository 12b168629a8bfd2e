"""Grain datasets and loaders as sources.

Nothing here imports Grain: an object can only be one of its classes if the program has
imported it already.
"""

import copy
import sys
from typing import Any

from armillary.typing import Batch

_KINDS = ("MapDataset", "IterDataset", "DataLoader")


class GrainSource:
    """A Grain dataset or loader whose elements are batches.

    A `MapDataset` must be batched (`dataset.batch(size)`). Every pass gives what the
    dataset gives: an order that changes from epoch to epoch is made in Grain, with
    `shuffle` and `repeat`.
    """

    is_repositionable = True
    full_size = None

    def __init__(self, dataset: Any, kind: str) -> None:
        self.name = f"grain.{kind}"
        self._dataset = dataset

    def make_iterator(self, epoch: int) -> "GrainIterator":
        """Returns an iterator over a new pass, whatever the epoch is."""
        return GrainIterator(iter(self._dataset))


class GrainIterator:
    """Reads batches, and states that do not change afterwards."""

    def __init__(self, iterator: Any) -> None:
        self._iterator = iterator

    def __next__(self) -> Batch:
        return next(self._iterator)

    def get_state(self) -> Any:
        """Returns a dictionary for datasets, bytes for loaders."""
        return copy.deepcopy(self._iterator.get_state())

    def set_state(self, state: Any) -> None:
        """Goes to a position."""
        self._iterator.set_state(state)


def as_grain_source(source: Any) -> GrainSource | None:
    """Returns a source if `source` belongs to Grain, or None."""
    grain = sys.modules.get("grain")
    for kind in _KINDS:
        if grain is not None and isinstance(source, getattr(grain, kind)):
            return GrainSource(source, kind)
    return None
