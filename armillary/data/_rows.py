"""Row numbers in place of rows, on the way from arrays in memory to a device.

The rows of a batch are wanted at the very end of its way. Until then (positions, shares
of replicas, chunks) their numbers do, and they are taken once, where they are going::

    {"rows": [7, 2, 5, 0]}   ----->  {"image": images[rows], "label": labels[rows]}
"""

from typing import Any, Protocol

import jax
import numpy as np

from armillary._typing import Batch, PyTree
from armillary.data._aligned import empty_aligned
from armillary.data._arrays import ArrayDataset, ArrayIterator
from armillary.data._batch import canonical_dtype
from armillary.data._layout import BatchLayout
from armillary.data._split import MASK, add_mask

ROWS = "rows"
MOST_ROWS = np.iinfo(np.int32).max
"""Most rows that the 32-bit numbers of a device can tell apart."""


class RowSource:
    """Gives the batches of an `ArrayDataset` as row numbers in place of rows."""

    is_repositionable = True

    def __init__(self, dataset: ArrayDataset) -> None:
        self.name = dataset.name
        self._dataset = dataset

    @property
    def full_size(self) -> int:
        """Examples in every batch but perhaps the last."""
        return self._dataset.full_size

    def make_iterator(self, epoch: int) -> ArrayIterator:
        """Returns an iterator from the start of `epoch`."""
        return ArrayIterator(self._dataset, epoch, _as_batch)


class RowTaker(Protocol):
    """Turns what a source gives into what a step receives."""

    @property
    def resident(self) -> PyTree:
        """Arrays that stay on the device, an input of `gather`; None without any."""
        ...

    def gather(self, resident: PyTree, batch: Batch) -> Batch:
        """Returns a placed batch as a step receives it; may be traced."""
        ...

    def prepare(self, batch: Batch) -> Batch:
        """Returns a host batch, or a chunk of them, as it travels to the device."""
        ...

    def place(self, batch: Batch, num_replicas: int) -> Batch:
        """Returns a host batch on the device, as a step receives it.

        `num_replicas` is how many share it, as for `BatchLayout.place`.
        """
        ...

    def sent_types(self, batch: Batch) -> Batch:
        """Returns the types of what travels to the device."""
        ...

    def types(self, batch: Batch) -> Batch:
        """Returns the types of what a step receives."""
        ...


class WholeRows:
    """Leaves batches as they are: the source gives rows.

    Args:
        layout: Where the replicas are.
    """

    resident = None

    def __init__(self, layout: BatchLayout) -> None:
        self._layout = layout

    def gather(self, resident: PyTree, batch: Batch) -> Batch:
        """Returns the batch itself."""
        del resident
        return batch

    def prepare(self, batch: Batch) -> Batch:
        """Returns the batch itself."""
        return batch

    def place(self, batch: Batch, num_replicas: int) -> Batch:
        """Returns a host batch on the device."""
        return self._layout.place(self.prepare(batch), num_replicas=num_replicas)

    def sent_types(self, batch: Batch) -> Batch:
        """Returns the types of what travels to the device."""
        return self.types(batch)

    def types(self, batch: Batch) -> Batch:
        """Returns the types themselves."""
        return batch


class HostRows(WholeRows):
    """Takes rows on the host, many batches at once.

    Args:
        arrays: Pytree of NumPy arrays.
        layout: Where the replicas are.
    """

    def __init__(self, arrays: PyTree, layout: BatchLayout) -> None:
        super().__init__(layout)
        self._arrays = arrays

    def prepare(self, batch: Batch) -> Batch:
        """Returns the rows that a batch of row numbers stands for."""
        numbers = batch[ROWS]
        rows = jax.tree.map(lambda array: _take(array, numbers), self._arrays)
        return add_mask(rows, batch[MASK]) if MASK in batch else rows

    def types(self, batch: Batch) -> Batch:
        """Returns the types of the rows that row numbers stand for."""
        return row_types(self._arrays, batch)


def row_types(arrays: PyTree, batch: Batch) -> Batch:
    """Returns the types of rows of `arrays` for those of a batch of row numbers."""
    shape = batch[ROWS].shape
    rows = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(
            (*shape, *leaf.shape[1:]), canonical_dtype(leaf)
        ),
        arrays,
    )
    return add_mask(rows, batch[MASK]) if MASK in batch else rows


def _take(array: np.ndarray, numbers: np.ndarray) -> np.ndarray:
    rows = empty_aligned((*numbers.shape, *array.shape[1:]), array.dtype)
    # Numbers come from the data set itself; to check them, NumPy would copy the rows.
    np.take(array, numbers, axis=0, out=rows, mode="clip")
    return rows.astype(canonical_dtype(array), copy=False)


def _as_batch(rows: np.ndarray) -> Any:
    return {ROWS: rows.astype(np.int32)}
