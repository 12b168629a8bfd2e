"""Batches of row numbers instead of rows, from arrays in memory to a step.

A batch needs its rows only at the end of its way. Until then (positions, shares of
replicas, chunks), row numbers are enough. The rows are taken once, at their
destination::

    on the host    {"rows": [7, 2]} -> {"image": images[[7, 2]]} -> the device
    on the device  {"rows": [7, 2]} -> the device -> {"image": images[[7, 2]]}
"""

import copy
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from armillary.data._layout import BatchLayout, InputOptions
from armillary.data.feed._piece import MASK, Piece, add_mask, get_mask
from armillary.data.sources._arrays import ArrayDataset
from armillary.data.sources._batch import as_device_values, canonical_dtype, show_path
from armillary.data.sources._source import Source
from armillary.typing import Batch, PyTree

_ROWS = "rows"
_MOST_ROWS = np.iinfo(np.int32).max
"""The largest number of rows for the 32-bit integers of a device."""
_ALIGNMENT_BYTES = 64


@dataclass(frozen=True, eq=False)
class Gather:
    """Turns the batches of a source into the batches that a step receives."""

    layout: BatchLayout
    arrays: PyTree | None = None  # the arrays of the row numbers; None for whole rows
    placed: "_PlacedArrays | None" = None  # these arrays on the devices, if they stay

    @property
    def resident(self) -> PyTree:
        """The arrays that stay on the devices, an input of `on_device`; or `None`."""
        return None if self.placed is None else self.placed.get()

    def on_host(self, batch: Batch, *, later: bool = False) -> Batch:
        """Returns a host batch, or a chunk of them, as it travels to the device."""
        if self.arrays is None or self.placed is not None:
            return batch
        numbers = batch[_ROWS]

        def take_later(path: Any, array: np.ndarray) -> _LazyRows:
            return _LazyRows(show_path(path), array, numbers)

        if later:
            rows = jax.tree_util.tree_map_with_path(take_later, self.arrays)
        else:
            rows = _take(self.arrays, numbers)
        return _with_mask(rows, batch)

    def send(self, batch: Batch, leading_axes: int, num_replicas: int) -> Batch:
        """Places a host batch, or a chunk of them; the arguments are as in `place`."""
        layout = self.layout
        has_all = not (layout.peers.is_alone or layout.stacked)
        sent = self.on_host(batch, later=has_all)
        return layout.place(sent, leading_axes, num_replicas)

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
        has_mask = len(leaves) > len(jax.tree.leaves(self.arrays))
        if has_mask:
            sent[MASK] = get_mask(types)
        return sent, _on_device(self.arrays, lambda array: array.shape)

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
        if self.arrays is None:
            return types
        shape = types[_ROWS].shape
        rows = _on_device(self.arrays, lambda array: (*shape, *array.shape[1:]))
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
    source: Source, layout: BatchLayout, options: InputOptions
) -> tuple[Source, Gather]:
    """Returns the source to read, perhaps of row numbers, and its `Gather`."""
    num_rows = source.num_examples if isinstance(source, ArrayDataset) else 0
    if not 0 < num_rows <= _MOST_ROWS:
        if options.place_on_device:
            raise TypeError(
                f"`place_on_device` is True, but the source ({source.name}) has no "
                f"arrays of at most {_MOST_ROWS} examples, as `from_arrays` has them. "
                "Leave `place_on_device` out, and batches are sent from the host."
            )
        return source, Gather(layout)
    assert isinstance(source, ArrayDataset)

    placed = None
    if options.place_on_device:
        if options.remainder == "pad":
            add_mask(source.arrays, None)
        with _lock:
            by_layout = _placed.setdefault(source, weakref.WeakValueDictionary())
            placed = by_layout.get(layout) or _PlacedArrays(source.arrays, layout)
            by_layout[layout] = placed
    numbers = copy.copy(source)
    numbers.arrays = {_ROWS: np.arange(source.num_examples, dtype=np.int32)}
    return numbers, Gather(layout, source.arrays, placed)


@dataclass(frozen=True, eq=False)
class _LazyRows:
    """Rows of an array, from which a process takes only the rows for its devices."""

    path: str
    array: np.ndarray
    numbers: np.ndarray

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.numbers.shape, *self.array.shape[1:])

    def __getitem__(self, index: tuple[slice, ...]) -> np.ndarray:
        # Complete rows, because only the first axes are split.
        numbers = self.numbers[index[: self.numbers.ndim]]
        return _take({self.path: self.array}, numbers)[self.path]


def _take(arrays: PyTree, numbers: np.ndarray) -> PyTree:
    def take(array: np.ndarray) -> np.ndarray:
        rows = empty_aligned((*numbers.shape, *array.shape[1:]), array.dtype)
        # The numbers come from the dataset itself. With `mode="raise"`, NumPy would
        # copy the rows once more.
        return np.take(array, numbers, axis=0, out=rows, mode="clip")

    taken = jax.tree.map(take, arrays)
    return as_device_values(taken, lambda: "`arrays`", numbers)


def empty_aligned(shape: Sequence[int], dtype: Any) -> np.ndarray:
    """Returns an array whose memory XLA's CPU client can share.

    Do not write to it after it was given to JAX.
    """
    dtype = np.dtype(dtype)
    num_bytes = int(np.prod(shape)) * dtype.itemsize
    memory = np.empty(num_bytes + _ALIGNMENT_BYTES, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT_BYTES
    return memory[start : start + num_bytes].view(dtype).reshape(shape)


def _gather(layout: BatchLayout, arrays: PyTree, batch: Batch) -> Batch:
    return _with_mask(layout.gather(arrays, batch[_ROWS]), batch)


# The static argument is a layout, and not a `Gather`, because JAX keeps static
# arguments forever.
_compiled_gather = jax.jit(_gather, static_argnums=0)


def _with_mask(rows: Batch, batch: Batch) -> Batch:
    return add_mask(rows, batch[MASK]) if MASK in batch else rows
