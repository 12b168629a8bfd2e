"""Pieces: the rows of one step, and the mask that marks the rows that count."""

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from armillary.data._layout import Active
from armillary.data.feed._position import Position
from armillary.data.sources._batch import get_signature
from armillary.typing import PyTree

MASK = "mask"


@dataclass(frozen=True, eq=False)
class Piece:
    """The rows of this process for one step: a distributed batch, or a part of it."""

    arrays: PyTree
    active: Active  # replicas that have data
    num_replicas: int  # replicas that share it: all of them, or a divisor
    position: Position  # the position after it
    is_last: bool  # whether it is the last piece of its group
    mark: str = ""  # tells its global batch from others, if processes compare them

    @property
    def positions(self) -> list[tuple[Position, ...]]:
        """The position after it, in the form of `Chunk.positions`."""
        return [(self.position,)]

    @property
    def signature(self) -> Hashable:
        """A key that is equal for pieces that one program can take."""
        return get_signature(self.arrays), self.active, self.num_replicas


def count_rows(arrays: PyTree) -> int:
    return jax.tree.leaves(arrays)[0].shape[0]


def get_mask(batch: PyTree) -> Any:
    """Returns the leaf that `remainder="pad"` has added to a batch."""
    return batch[MASK] if isinstance(batch, dict) else batch[-1]


def hide_rows(batch: PyTree) -> PyTree:
    """Returns a batch with a mask whose mask hides all rows."""
    hidden = np.zeros_like(get_mask(batch))
    if isinstance(batch, dict):
        return {**batch, MASK: hidden}
    return type(batch)([*batch[:-1], hidden])


def add_mask(batch: PyTree, mask: object) -> PyTree:
    """Returns `batch` with the leaf that `remainder="pad"` adds."""
    if type(batch) in (tuple, list):
        return type(batch)([*batch, mask])
    if not isinstance(batch, dict):
        raise TypeError(
            f"The batches are of type {type(batch).__name__}, but "
            '`InputOptions(remainder="pad")` adds a mask to each, as the entry '
            f"`{MASK}` of a dictionary or as the last item of a tuple. Return one of "
            'these from the dataset, or use `remainder="exact"` or `"drop"`.'
        )
    if MASK in batch:
        raise ValueError(
            f"The batches have a leaf `{MASK}` already, which `InputOptions(remainder="
            '"pad")` adds to each. Rename it in the dataset.'
        )
    return {**batch, MASK: mask}
