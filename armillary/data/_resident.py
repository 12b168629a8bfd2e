"""Arrays that stay on the device, so that only row numbers travel.

The host draws the order and shares out batches as it always does; the rows are gathered
on the device of each replica, inside the compiled loop. So the examples of every batch
and the saved positions are the same as without it.
"""

import threading
import weakref
from typing import Any

import jax

from armillary._typing import Batch, PyTree
from armillary.data._arrays import ArrayDataset
from armillary.data._batch import canonical_dtype
from armillary.data._layout import BatchLayout
from armillary.data._options import InputOptions
from armillary.data._rows import (
    MOST_ROWS,
    ROWS,
    HostRows,
    RowSource,
    RowTaker,
    WholeRows,
    row_types,
)
from armillary.data._source import Source
from armillary.data._split import MASK, add_mask

_FIX = "leave `place_on_device` out, so that batches are sent from the host"


class ResidentArrays:
    """The arrays of one data set on the devices of one layout.

    They are placed when they are first asked for, and stay as long as this object.

    Args:
        arrays: Pytree of NumPy arrays.
        layout: Where the replicas are.
    """

    def __init__(self, arrays: PyTree, layout: BatchLayout) -> None:
        self._host_arrays = arrays
        self._layout = layout
        self._placed: PyTree = None
        self._lock = threading.Lock()

    @property
    def resident(self) -> PyTree:
        """The arrays on the devices.

        Raises:
            ValueError: If a device has no room for them.
        """
        # Background threads of several iterators may ask at the same time.
        with self._lock:
            if self._placed is None:
                _check_room(self._host_arrays, self._layout)
                self._placed = self._layout.replicate(
                    jax.tree.map(
                        lambda leaf: leaf.astype(canonical_dtype(leaf), copy=False),
                        self._host_arrays,
                    )
                )
            return self._placed

    def gather(self, resident: PyTree, batch: Batch) -> Batch:
        """Returns the rows that a placed batch of row numbers stands for.

        Args:
            resident: The `resident` of this object, given so that a traced function has
                them as inputs.
            batch: What the layout made of a batch of a `RowSource`.
        """
        return _gather(self._layout, resident, batch)

    def place(self, batch: Batch, num_replicas: int) -> Batch:
        """Returns the rows of a batch of row numbers that is still on the host."""
        placed = self._layout.place(batch, num_replicas=num_replicas)
        return _compiled_gather(self._layout, self.resident, placed)

    def prepare(self, batch: Batch) -> Batch:
        """Returns the row numbers themselves."""
        return batch

    def sent_types(self, batch: Batch) -> Batch:
        """Returns the types of row numbers."""
        return batch

    def types(self, batch: Batch) -> Batch:
        """Returns what `gather` gives for row numbers; both as `jax.ShapeDtypeStruct`.

        Nothing is placed or traced for it.
        """
        return row_types(self._host_arrays, batch)


def make_row_taker(
    source: Source, layout: BatchLayout, options: InputOptions
) -> tuple[Source, RowTaker]:
    """Returns what to read in place of `source`, and how its batches become rows.

    Nothing is placed yet. Datasets of one source on one layout share the arrays that
    stay on devices.

    Raises:
        TypeError: If arrays should stay on the device, and the source does not come
            from `from_arrays`.
        ValueError: If it has more rows than 32-bit row numbers can tell apart.
    """
    if options.place_on_device:
        return _make_resident(source, layout, options)
    if not isinstance(source, ArrayDataset) or source.num_examples > MOST_ROWS:
        return source, WholeRows(layout)
    return RowSource(source), HostRows(source.arrays, layout)


def _make_resident(
    source: Source, layout: BatchLayout, options: InputOptions
) -> tuple[RowSource, ResidentArrays]:
    if not isinstance(source, ArrayDataset):
        raise TypeError(
            f"`place_on_device` is True, but the source ({source.name}) makes its "
            "batches as it goes, and only whole arrays can stay on a device. Use "
            f"`armillary.data.from_arrays(arrays, batch_size=...)`, or {_FIX}."
        )
    if source.num_examples > MOST_ROWS:
        raise ValueError(
            f"`place_on_device` is True, but the arrays have {source.num_examples} "
            f"examples, and devices count rows in 32 bits: up to {MOST_ROWS}. Use "
            f"fewer examples, or {_FIX}."
        )
    if options.remainder == "pad":
        add_mask(source.arrays, None)
    return RowSource(source), _get_shared(source, layout)


_shared: weakref.WeakKeyDictionary[ArrayDataset, Any] = weakref.WeakKeyDictionary()
_shared_lock = threading.Lock()


def _get_shared(source: ArrayDataset, layout: BatchLayout) -> ResidentArrays:
    with _shared_lock:
        by_layout = _shared.setdefault(source, weakref.WeakValueDictionary())
        resident = by_layout.get(layout)
        if resident is None:
            resident = by_layout[layout] = ResidentArrays(source.arrays, layout)
        return resident


def _gather(layout: BatchLayout, arrays: PyTree, batch: Batch) -> Batch:
    rows = layout.gather(arrays, batch[ROWS])
    return add_mask(rows, batch[MASK]) if MASK in batch else rows


_compiled_gather = jax.jit(_gather, static_argnums=0)


def _check_room(arrays: PyTree, layout: BatchLayout) -> None:
    """Raises if a device that knows its memory has too little left.

    Raises:
        ValueError: If there is such a device.
    """
    num_bytes = sum(
        leaf.size * canonical_dtype(leaf).itemsize for leaf in jax.tree.leaves(arrays)
    )
    for device in layout.devices:
        memory = device.memory_stats() or {}
        limit = memory.get("bytes_limit")
        if limit is None:
            continue
        num_free = limit - memory.get("bytes_in_use", 0)
        if num_bytes > num_free:
            raise ValueError(
                f"`place_on_device` is True, but the arrays take {num_bytes} bytes on "
                f"each device, and {device} has {num_free} of {limit} bytes free. Use "
                f"smaller arrays or dtypes, or {_FIX}."
            )
