"""Batches of row numbers instead of rows, from a dataset to a step.

A batch needs its rows only at the end of its way. Until then (positions, shares of
replicas, chunks), row numbers are enough. The rows are read once, at their destination,
so each process reads only the rows of its own devices::

    on the host    {"rows": [7, 2]} -> {"image": images[[7, 2]]} -> the device
    on the device  {"rows": [7, 2]} -> the device -> {"image": images[[7, 2]]}
"""

import math
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from armillary.data._layout import BatchLayout, Index, InputOptions
from armillary.data.feed._piece import MASK, Piece, add_mask, get_mask
from armillary.data.sources._arrays import (
    ArrayDataset,
    IndexedDataset,
    IndexedIterator,
    find_indexed,
)
from armillary.data.sources._batch import (
    as_device_values,
    canonical_dtype,
    get_signature,
)
from armillary.data.sources._source import Source
from armillary.data.sources._take import NO_ROW
from armillary.typing import Batch, PyTree

_ROWS = "rows"
_MAX_ROWS = np.iinfo(np.int32).max
"""The largest number of rows for the 32-bit integers of a device."""


@dataclass(frozen=True, eq=False)
class Gather:
    """Turns the batches of a source into the batches that a step receives."""

    layout: BatchLayout
    dataset: IndexedDataset | None = None  # of the row numbers; None for whole rows
    placed: "_PlacedArrays | None" = None  # its arrays on the devices, if they stay
    is_shared: bool = True  # whether all processes divide the batches of one dataset

    @property
    def resident(self) -> PyTree:
        """The arrays that stay on the devices, an input of `on_device`; or `None`."""
        return None if self.placed is None else self.placed.get()

    def on_host(self, batch: Batch) -> Batch:
        """Returns a host batch as it travels to the device."""
        if not self._has_numbers:
            return batch
        rows = _Rows(self.dataset, batch[_ROWS])
        return _with_mask(rows.read(), batch)

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
            rows = _Rows(self.dataset, batch[_ROWS], leading_axes, num_filled)
            # The numbers of all rows, of which other processes read some.
            is_divided = not layout.peers.is_alone and not layout.stacked
            has_all_numbers = self.is_shared and is_divided
            if has_all_numbers:
                own = layout.own_parts(rows.numbers.shape, leading_axes)
                batch = _with_mask(rows.read_parts(own), batch)
            else:
                batch = _with_mask(rows.read(), batch)
        return layout.place(batch, leading_axes, num_replicas)

    @property
    def _has_numbers(self) -> bool:
        """True if host batches hold row numbers, and devices get rows."""
        return self.dataset is not None and self.placed is None

    def on_device(self, resident: PyTree, batch: Batch) -> Batch:
        """Returns a placed batch as a step receives it; may be traced."""
        if self.placed is None:
            return batch
        return _gather(self.layout, resident, batch)

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

        def whole_shape(leaf: Any) -> tuple[int, ...]:
            """Returns the shape of a leaf with the rows of all processes."""
            first, *others = leaf.shape
            if not layout.stacked:
                return (first * len(layout.pipelines), *others)
            # A process holds the rows of its own replicas.
            num_replicas = first if layout.peers.is_alone else batch.num_replicas
            return (num_replicas, *others)

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
        self._placed: dict[Any, PyTree] = {}

    def get(self) -> PyTree:
        # Background threads of several iterators may ask at the same time.
        with _lock:
            # The dtypes on a device change with `jax_enable_x64`.
            signature = get_signature(self._arrays)
            if signature not in self._placed:
                arrays = as_device_values(self._arrays, lambda: "`arrays`")
                self._placed[signature] = self._layout.replicate(arrays)
            return self._placed[signature]


# Datasets of one source on one layout share them.
_placed: weakref.WeakKeyDictionary[ArrayDataset, Any] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


def make_gather(
    source: Source,
    layout: BatchLayout,
    options: InputOptions,
    *,
    is_shared: bool,
) -> tuple[Source, Gather]:
    """Returns the source to read, perhaps of row numbers, and its `Gather`.

    Args:
        source: The source.
        layout: The placement of batches on devices.
        options: The options of the distributed dataset.
        is_shared: Whether all processes divide the batches of one dataset.
    """
    stays = options.place_on_device
    if stays:
        _check_can_stay(source, layout, is_shared=is_shared)

    # Rows in memory cost nothing to take late. Other rows are read batch by batch if
    # this process needs all of them, so that an error comes after the batches before.
    has_arrays = isinstance(source, ArrayDataset)
    needs_all = layout.peers.is_alone or not is_shared
    if needs_all and not has_arrays:
        return source, Gather(layout)
    dataset = find_indexed(source)
    if dataset is None:
        return source, Gather(layout)

    placed = None
    if stays:
        assert isinstance(source, ArrayDataset)
        if options.remainder == "pad":
            add_mask(source.arrays, None)  # raises if the arrays can have no mask
        placed = _find_placed(source, layout)
    dtype = np.int32 if stays else np.int64
    gather = Gather(layout, dataset, placed, is_shared)
    return _Numbers(source, dataset, dtype), gather


def _check_can_stay(source: Source, layout: BatchLayout, *, is_shared: bool) -> None:
    """Raises if the arrays of a source cannot stay on the devices."""
    has_arrays = isinstance(source, ArrayDataset)
    can_stay = has_arrays and source.num_examples <= _MAX_ROWS
    if not can_stay:
        raise TypeError(
            f"`place_on_device` is True, but the source ({source.name}) has no "
            f"arrays of at most {_MAX_ROWS} examples, as `from_arrays` has them. "
            "Leave `place_on_device` out, and batches are sent from the host."
        )
    has_equal_arrays = is_shared or layout.stacked or layout.peers.is_alone
    if not has_equal_arrays:
        raise ValueError(
            "`place_on_device` is True, but each input pipeline (a function with an "
            "`input_context`) has arrays of its own, and one replica spans all "
            "processes, so its devices need equal arrays. Leave `place_on_device` out, "
            "or distribute one dataset over all processes "
            "(`strategy.distribute_dataset`)."
        )


def _find_placed(source: ArrayDataset, layout: BatchLayout) -> _PlacedArrays:
    """Returns the arrays of a source on a layout, which all of its datasets share."""
    with _lock:
        by_layout = _placed.setdefault(source, weakref.WeakValueDictionary())
        placed = by_layout.get(layout) or _PlacedArrays(source.arrays, layout)
        by_layout[layout] = placed
    return placed


class _Numbers:
    """The row numbers of a source, in its batches, order and positions."""

    is_repositionable = True
    has_row_numbers = True

    def __init__(self, source: Source, dataset: IndexedDataset, dtype: Any) -> None:
        self._dataset = dataset
        self._dtype = dtype
        self.name = source.name
        self.full_size = source.full_size
        self.num_batches: int | None = getattr(source, "num_batches", None)

    def make_iterator(self, epoch: int) -> IndexedIterator:
        return self._dataset.iterate(epoch, self._as_batch)

    def _as_batch(self, rows: np.ndarray) -> Batch:
        return {_ROWS: rows.astype(self._dtype)}


class _Rows:
    """The rows of a batch, or of a chunk, as row numbers until they are placed.

    `num_filled` is the number of batches in a chunk that have data.
    """

    def __init__(
        self,
        dataset: IndexedDataset | None,
        numbers: np.ndarray,
        leading_axes: int = 0,
        num_filled: int | None = None,
    ) -> None:
        assert dataset is not None
        self._dataset = dataset
        self.numbers = numbers
        if num_filled is not None:
            self.numbers = numbers.copy()
            self.numbers[num_filled:] = NO_ROW
        # The batch of each row, because a row is read once for a batch.
        sizes = numbers.shape[:leading_axes]
        row_axes = [1] * (numbers.ndim - leading_axes)
        batches = np.arange(math.prod(sizes)).reshape(*sizes, *row_axes)
        self._batches = np.broadcast_to(batches, numbers.shape)

    def read(self) -> PyTree:
        """Returns all rows."""
        (rows,) = self._read([...])
        return rows

    def read_parts(self, indices: Sequence[Index]) -> PyTree:
        """Returns leaves that have only the rows of some parts, which overlap or not.

        The rows of all parts, and all leaves of a row, are read together.
        """
        shape = self.numbers.shape
        # Several devices may hold the same part.
        unique = {_as_key(index, shape): index for index in indices}
        rows = self._read(list(unique.values()))
        parts = dict(zip(unique, rows, strict=True))

        def join(row: Any, *leaves: np.ndarray) -> _PartsOfRows:
            by_index = dict(zip(parts, leaves, strict=True))
            return _PartsOfRows(shape, row.shape, by_index)

        return jax.tree.map(join, self._dataset.row_types, *parts.values())

    def _read(self, indices: Sequence[Any]) -> list[PyTree]:
        """Returns the rows of each index, from one read for all of them."""
        numbers = [self.numbers[index] for index in indices]
        flat = np.concatenate([part.reshape(-1) for part in numbers])
        batches = [self._batches[index].reshape(-1) for index in indices]
        rows = self._dataset.take_examples(flat, np.concatenate(batches))

        found: list[PyTree] = []
        start = 0
        for part in numbers:
            stop = start + part.size
            found.append(_cut(rows, slice(start, stop), part.shape))
            start = stop
        return found


def _cut(rows: PyTree, own: slice, shape: tuple[int, ...]) -> PyTree:
    """Returns a range of rows, with axes of this shape in place of the first one."""

    def cut(leaf: np.ndarray) -> np.ndarray:
        return leaf[own].reshape(*shape, *leaf.shape[1:])

    return jax.tree.map(cut, rows)


@dataclass(frozen=True, eq=False)
class _PartsOfRows:
    """A leaf of a batch, of which this process has the rows for its devices."""

    batch_shape: tuple[int, ...]
    row_shape: tuple[int, ...]
    parts: dict[str, np.ndarray]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.batch_shape + self.row_shape

    def __getitem__(self, index: Index) -> np.ndarray:
        # Complete rows, because only the first axes are split.
        return self.parts[_as_key(index, self.batch_shape)]


def _as_key(index: Index, shape: tuple[int, ...]) -> str:
    """Returns a text that is equal for indices of the same part."""
    ranges = [range(size)[own] for own, size in zip(index, shape, strict=False)]
    return str(ranges)


def _gather(layout: BatchLayout, arrays: PyTree, batch: Batch) -> Batch:
    rows = layout.gather(arrays, batch[_ROWS])
    return _with_mask(rows, batch)


# The static argument is a layout, and not a `Gather`, because JAX keeps static
# arguments forever.
_compiled_gather = jax.jit(_gather, static_argnums=0)


def _with_mask(rows: Batch, batch: Batch) -> Batch:
    """Returns rows with the mask of the batch of row numbers, if it has one."""
    if MASK not in batch:
        return rows
    return add_mask(rows, batch[MASK])
