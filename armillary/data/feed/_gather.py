"""Batches of row numbers instead of rows, from a dataset to a step.

A batch needs its rows only at the end of its way. Until then (positions, shares of
replicas, chunks), row numbers are enough. The rows are read once, at their destination,
so each process reads only the rows of its own devices::

    on the host    {"rows": [7, 2]} -> {"image": images[[7, 2]]} -> the device
    on the device  {"rows": [7, 2]} -> the device -> {"image": images[[7, 2]]}
"""

import threading
import weakref
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from armillary.data._layout import BatchLayout, InputOptions
from armillary.data.feed._piece import MASK, Piece, add_mask, get_mask
from armillary.data.sources._arrays import (
    ArrayDataset,
    IndexedDataset,
    IndexedIterator,
)
from armillary.data.sources._batch import as_device_values, canonical_dtype, show_path
from armillary.data.sources._source import Source
from armillary.data.sources._take import NO_ROW
from armillary.typing import Batch, PyTree

_ROWS = "rows"
_MOST_ROWS = np.iinfo(np.int32).max
"""The largest number of rows for the 32-bit integers of a device."""


@dataclass(frozen=True, eq=False)
class Gather:
    """Turns the batches of a source into the batches that a step receives."""

    layout: BatchLayout
    dataset: IndexedDataset | None = None  # of the row numbers; None for whole rows
    placed: "_PlacedArrays | None" = None  # its arrays on the devices, if they stay

    @property
    def resident(self) -> PyTree:
        """The arrays that stay on the devices, an input of `on_device`; or `None`."""
        return None if self.placed is None else self.placed.get()

    def on_host(self, batch: Batch) -> Batch:
        """Returns a host batch as it travels to the device."""
        if not self._has_numbers:
            return batch
        assert self.dataset is not None
        return _with_mask(_Rows(self.dataset, batch[_ROWS]).now(), batch)

    def send(
        self,
        batch: Batch,
        leading_axes: int,
        num_replicas: int,
        num_filled: int | None = None,
    ) -> Batch:
        """Places a host batch, or a chunk of them.

        Args:
            batch: The batch, or the chunk.
            leading_axes: As in `BatchLayout.place`.
            num_replicas: As in `BatchLayout.place`.
            num_filled: The number of batches in the chunk that have data.
        """
        layout = self.layout
        if self._has_numbers:
            assert self.dataset is not None
            rows = _Rows(self.dataset, batch[_ROWS], leading_axes, num_filled)
            has_all = not (layout.peers.is_alone or layout.stacked)
            batch = _with_mask(rows.later() if has_all else rows.now(), batch)
        return layout.place(batch, leading_axes, num_replicas)

    @property
    def _has_numbers(self) -> bool:
        """True if host batches hold row numbers, and devices get rows."""
        return self.dataset is not None and self.placed is None

    def on_device(self, resident: PyTree, batch: Batch) -> Batch:
        """Returns a placed batch as a step receives it; may be traced."""
        return batch if self.placed is None else _gather(self.layout, resident, batch)

    def place(self, batch: Piece) -> Batch:
        """Returns a host batch on the devices, as a step receives it."""
        placed = self.send(batch.arrays, 0, batch.num_replicas)
        if self.placed is None:
            return placed
        return _compiled_gather(self.layout, self.resident, placed)

    def sent_types(self, types: Batch) -> tuple[Batch, PyTree]:
        """Returns the types of a program's inputs for one batch; places nothing."""
        if self.placed is None:
            return types, None
        leaves = jax.tree.leaves(types)
        shape = leaves[0].shape[:1]
        sent = {_ROWS: jax.ShapeDtypeStruct(shape, np.int32)}
        assert isinstance(self.dataset, ArrayDataset)
        arrays = self.dataset.arrays
        has_mask = len(leaves) > len(jax.tree.leaves(arrays))
        if has_mask:
            sent[MASK] = get_mask(types)
        return sent, _on_device(arrays, lambda array: array.shape)

    def types(self, batch: Piece, *, as_sent: bool = False) -> Batch:
        """Returns the types of a piece in a step, or as it is sent (`as_sent`)."""
        layout = self.layout
        # A process holds the rows of its own replicas.
        has_some = layout.stacked and not layout.peers.is_alone

        def whole_shape(leaf: Any) -> tuple[int, ...]:
            return (batch.num_replicas, *leaf.shape[1:]) if has_some else leaf.shape

        types = _on_device(batch.arrays, whole_shape)
        sends_numbers = as_sent and self.placed is not None
        return types if sends_numbers else self.rows(types)

    def rows(self, types: Batch) -> Batch:
        """Converts the types of the source's batches to types of rows."""
        if self.dataset is None:
            return types
        shape = types[_ROWS].shape
        rows = _on_device(self.dataset.row_types, lambda row: (*shape, *row.shape))
        return _with_mask(rows, types)


def _on_device(arrays: PyTree, get_shape: Any) -> PyTree:
    """Returns the types that arrays have on a device, with other shapes."""

    def type_of(leaf: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(get_shape(leaf), canonical_dtype(leaf))

    return jax.tree.map(type_of, arrays)


class _PlacedArrays:
    """Arrays that are placed on the devices of a layout when they are first used."""

    def __init__(self, arrays: PyTree, layout: BatchLayout) -> None:
        self._arrays = arrays
        self._layout = layout
        self._placed: PyTree = None

    def get(self) -> PyTree:
        # Background threads of several iterators may ask at the same time.
        with _lock:
            if self._placed is None:
                arrays = as_device_values(self._arrays, lambda: "`arrays`")
                self._placed = self._layout.replicate(arrays)
            return self._placed


# Datasets of one source on one layout share them.
_placed: weakref.WeakKeyDictionary[ArrayDataset, Any] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


def make_gather(
    source: Source, layout: BatchLayout, options: InputOptions, *, is_shared: bool
) -> tuple[Source, Gather]:
    """Returns the source to read, perhaps of row numbers, and its `Gather`.

    Args:
        source: The source.
        layout: The placement of batches on devices.
        options: The options of the distributed dataset.
        is_shared: Whether all processes divide the batches of one dataset.
    """
    has_arrays = isinstance(source, ArrayDataset) and source.num_examples <= _MOST_ROWS
    if options.place_on_device and not has_arrays:
        raise TypeError(
            f"`place_on_device` is True, but the source ({source.name}) has no "
            f"arrays of at most {_MOST_ROWS} examples, as `from_arrays` has them. "
            "Leave `place_on_device` out, and batches are sent from the host."
        )
    if not isinstance(source, IndexedDataset) or source.num_examples > _MOST_ROWS:
        return source, Gather(layout)
    # Rows in memory cost nothing to take late. Other rows are read batch by batch if
    # this process needs all of them, so that an error comes after the batches before.
    needs_all = layout.peers.is_alone or not is_shared
    if needs_all and not has_arrays:
        return source, Gather(layout)

    placed = None
    if options.place_on_device:
        assert isinstance(source, ArrayDataset)
        if options.remainder == "pad":
            add_mask(source.arrays, None)
        with _lock:
            by_layout = _placed.setdefault(source, weakref.WeakValueDictionary())
            placed = by_layout.get(layout) or _PlacedArrays(source.arrays, layout)
            by_layout[layout] = placed
    return _Numbers(source), Gather(layout, source, placed)


class _Numbers:
    """A source with the row numbers of a dataset, in its order and positions."""

    is_repositionable = True

    def __init__(self, dataset: IndexedDataset) -> None:
        self._dataset = dataset
        self.name = dataset.name
        self.full_size = dataset.full_size
        self.num_batches = dataset.num_batches

    def make_iterator(self, epoch: int) -> IndexedIterator:
        return IndexedIterator(self._dataset, epoch, self._as_batch)

    def _as_batch(self, rows: np.ndarray) -> Batch:
        return {_ROWS: rows.astype(np.int32)}


class _Rows:
    """The rows of a batch, or of a chunk, as row numbers until they are placed.

    `num_filled` is the number of batches in a chunk that have data.
    """

    def __init__(
        self,
        dataset: IndexedDataset,
        numbers: np.ndarray,
        leading_axes: int = 0,
        num_filled: int | None = None,
    ) -> None:
        self._dataset = dataset
        self._leading_axes = leading_axes
        self.numbers = numbers
        if num_filled is not None:
            self.numbers = numbers.copy()
            self.numbers[num_filled:] = NO_ROW
        self._parts: dict[str, dict[str, np.ndarray]] = {}

    def now(self) -> PyTree:
        """Returns all rows."""
        return self._read(self.numbers)

    def later(self) -> PyTree:
        """Returns leaves that read rows when a part of them is asked for."""
        return jax.tree_util.tree_map_with_path(
            lambda path, row: _LazyRows(self, show_path(path), row.shape),
            self._dataset.row_types,
        )

    def read_part(self, index: tuple[slice, ...]) -> dict[str, np.ndarray]:
        """Returns the leaves of some rows by path, from one read for all leaves."""
        key = str(index)
        if key not in self._parts:
            rows = self._read(self.numbers[index])
            leaves = jax.tree_util.tree_leaves_with_path(rows)
            self._parts[key] = {show_path(path): leaf for path, leaf in leaves}
        return self._parts[key]

    def _read(self, numbers: np.ndarray) -> PyTree:
        num_batches = len(numbers) if self._leading_axes else 1
        rows = self._dataset.take(numbers.reshape(num_batches, -1))
        return jax.tree.map(
            lambda leaf: leaf.reshape(*numbers.shape, *leaf.shape[2:]), rows
        )


@dataclass(frozen=True, eq=False)
class _LazyRows:
    """A leaf of rows, from which a process reads only the rows for its devices."""

    rows: _Rows
    path: str
    row_shape: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.rows.numbers.shape, *self.row_shape)

    def __getitem__(self, index: tuple[slice, ...]) -> np.ndarray:
        # Complete rows, because only the first axes are split.
        return self.rows.read_part(index[: self.rows.numbers.ndim])[self.path]


def _gather(layout: BatchLayout, arrays: PyTree, batch: Batch) -> Batch:
    return _with_mask(layout.gather(arrays, batch[_ROWS]), batch)


# The static argument is a layout, and not a `Gather`, because JAX keeps static
# arguments forever.
_compiled_gather = jax.jit(_gather, static_argnums=0)


def _with_mask(rows: Batch, batch: Batch) -> Batch:
    return add_mask(rows, batch[MASK]) if MASK in batch else rows
