"""Rules that turn source batches into pieces that the replicas can share.

A *group* becomes one distributed batch: one global batch, or one batch for each
replica. A group that fits becomes one piece. `InputOptions.remainder` decides about any
other group. With `"exact"`, it becomes one piece for fewer replicas, each on several
devices. In an evaluation, where steps add up, it becomes several smaller pieces::

    global batch of 10 rows on 4 replicas      5 rows for each of 2 replicas
      in an evaluation                         piece 1: rows 0-7, 2 for each replica
                                               piece 2: rows 8-9, 1 for replicas 0 and 1
    replica batches of 8, 8 and 3 rows         19 rows for 1 replica
      (then the data ends), in an evaluation   piece 1: 8 rows for replicas 0 and 1
                                               piece 2: 3 rows for replica 0
"""

import math
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np

from armillary.data._layout import (
    count_own_batches,
    find_pipeline,
    first_replicas,
    hosted_replicas,
)
from armillary.data.feed._input import Input
from armillary.data.feed._piece import Piece, add_mask, count_rows
from armillary.data.feed._position import Position
from armillary.data.feed._stream import SourceBatch
from armillary.errors import BatchSizeError
from armillary.typing import PyTree

_FIXES = (
    '`armillary.data.InputOptions(remainder="exact")` to run it on fewer replicas, '
    '`"drop"` to leave examples out, or `"pad"` to fill up and get a `mask`'
)


class Splitter:
    """Splits batches between this process's replicas, for an evaluation `in_pieces`."""

    def __init__(self, data: Input, *, in_pieces: bool) -> None:
        layout = data.layout
        self._remainder = data.options.remainder
        self._stacked = layout.stacked
        self._in_pieces = in_pieces
        self._of_replicas = data.per_replica_batches
        self._num_own_batches = count_own_batches(layout)
        self._num_replicas = layout.num_replicas
        self._local: range | None = None
        if layout.stacked and not layout.peers.is_alone:
            if self._of_replicas:
                self._num_replicas = len(layout.local_replicas)
            else:
                self._local = layout.local_replicas
        # The examples of an indexed dataset were compared when it was distributed.
        self._is_marked = self._local is not None and not data.is_indexed
        self._num_shares = self._num_replicas if layout.stacked else 1
        self._group_size = self._num_shares if self._of_replicas else 1
        # The shares in which a process divides the batch of its input pipeline.
        self._num_parts = 1
        if data.is_agreed and not layout.stacked:
            self._num_parts = layout.num_shares // len(layout.pipelines)
        if self._of_replicas:
            # Processes of one pipeline must have the same batches.
            processes = layout.pipelines[find_pipeline(layout)]
            self._is_marked |= len(processes) > 1
        # Whether a group that does not fit is one piece for fewer replicas.
        is_exact = self._remainder == "exact"
        self._narrows = is_exact and layout.stacked and not in_pieces

    def split(
        self, batches: Iterator[SourceBatch], before: Position
    ) -> Iterator[Piece]:
        """Yields all pieces of batches that begin at the position `before`."""
        for group, after in self._read_groups(batches):
            pieces = self._split_group(group, after.full_size or 0)
            mark = _mark(group) if self._is_marked else ""
            for index, (arrays, num_active) in enumerate(pieces, start=1):
                active = first_replicas(num_active)
                is_last = index == len(pieces)
                count = count_rows(arrays) if self._stacked else self._num_replicas
                if self._local is not None:
                    own = hosted_replicas(self._local, self._num_replicas, count)
                    arrays = _take_rows(arrays, own.start, own.stop)
                # A program that stops within a group runs the whole group again.
                position = after if is_last else before
                yield Piece(arrays, active, count, position, is_last, mark)
            before = after

    def distributed_types(self, spec: PyTree, full_size: int) -> PyTree:
        """Converts the types of a source batch to types of a distributed batch."""
        num_rows = count_rows(spec)
        if self._remainder == "pad":
            num_rows = self._round_up(max(num_rows, full_size))
            spec = add_mask(spec, jax.ShapeDtypeStruct((num_rows,), np.dtype(bool)))
        elif self._remainder == "drop":
            num_rows = self._round_down(num_rows, full_size)
        if self._of_replicas:
            num_rows *= self._num_own_batches

        def distributed_type(leaf: Any) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct((num_rows, *leaf.shape[1:]), leaf.dtype)

        return jax.tree.map(distributed_type, spec)

    def _read_groups(
        self, batches: Iterator[SourceBatch]
    ) -> Iterator[tuple[list[PyTree], Position]]:
        """Yields the batches of each distributed batch, and the position after them."""
        group: list[PyTree] = []
        position = Position()
        for batch, position in batches:
            if self._remainder == "drop":
                num_rows = count_rows(batch)
                full_size = position.full_size or 0
                if num_rows < full_size:
                    continue
                batch = _take_rows(batch, 0, self._round_down(num_rows, full_size))
            group.append(batch)
            if len(group) == self._group_size:
                yield group, position
                group = []
        if group and self._remainder != "drop":
            yield group, position

    def _round_down(self, num_rows: int, full_size: int) -> int:
        """Returns the number of rows of a batch that `"drop"` keeps."""
        if self._of_replicas:
            return full_size
        if num_rows < self._num_shares:
            raise BatchSizeError(
                f"A batch has {num_rows} examples, fewer than the {self._num_shares} "
                'replicas, so `InputOptions(remainder="drop")` would drop the whole '
                f"batch. Use a batch size of at least {self._num_shares}."
            )
        return num_rows - num_rows % self._num_shares

    def _round_up(self, num_rows: int) -> int:
        """Returns the size to which `"pad"` fills a batch."""
        shares = self._num_parts if self._of_replicas else self._num_shares
        rows_per_share = -(-num_rows // shares)  # rounded up
        return rows_per_share * shares

    def _split_group(
        self, group: list[PyTree], full_size: int
    ) -> list[tuple[PyTree, int]]:
        """Returns the pieces of one group, each with its number of active replicas."""
        if self._remainder == "pad":
            group = self._pad_group(group, full_size)
        if not self._stacked:
            self._check_parts(count_rows(group[0]))
            return [(group[0], self._num_replicas)]
        if self._narrows:
            arrays = _concatenate(group)
            num_sharing = math.gcd(count_rows(arrays), self._num_replicas)
            return [(_add_replica_axis(arrays, num_sharing), num_sharing)]
        if self._of_replicas:
            return self._split_replica_batches(group)
        return self._split_global_batch(group[0])

    def _check_parts(self, num_rows: int) -> None:
        """Raises if devices cannot share the batch of an input pipeline."""
        count = self._num_parts
        if num_rows % count:
            raise BatchSizeError(
                f"A batch of this input pipeline has {num_rows} examples, but its "
                f"devices divide it into {count} parts ({num_rows} % {count} = "
                f"{num_rows % count}). Use a batch size that is a multiple of {count}, "
                "and leave out a smaller last batch "
                "(`from_arrays(..., drop_remainder=True)`). Or pass options to "
                "`strategy.distribute_datasets_from_function(dataset_fn, options)`: "
                '`armillary.data.InputOptions(remainder="drop")` to leave examples '
                'out, or `"pad"` to fill up and get a `mask`.'
            )

    def _pad_group(self, group: list[PyTree], full_size: int) -> list[PyTree]:
        """Returns a group with full batches, and with a batch for each replica."""
        sizes = [count_rows(batch) for batch in group]
        size = self._round_up(max(full_size, *sizes))
        full = [_pad(batch, size, num_seen=count_rows(batch)) for batch in group]
        empty = _pad(group[-1], size, num_seen=0)
        num_missing = self._group_size - len(group)
        return full + [empty] * num_missing

    def _split_global_batch(self, arrays: PyTree) -> list[tuple[PyTree, int]]:
        """Returns the pieces of a batch, with the number of replicas that have data."""
        count = self._num_replicas
        num_rows = count_rows(arrays)
        num_left = num_rows % count
        if num_left and not self._in_pieces:
            raise BatchSizeError(
                f"A batch has {num_rows} examples, which {count} replicas cannot share "
                f"equally ({num_rows} % {count} = {num_left}). Use a batch size that "
                f"is a multiple of {count}, and leave out a smaller last batch "
                "(`from_arrays(..., drop_remainder=True)`). Or pass options to "
                f"`strategy.distribute_dataset(source, options)`: {_FIXES}."
            )

        pieces: list[tuple[PyTree, int]] = []
        num_shared = num_rows - num_left
        if num_shared:
            rows = _take_rows(arrays, 0, num_shared)
            pieces.append((_add_replica_axis(rows, count), count))
        if num_left:
            left = range(num_shared, num_rows)
            shares = [_take_rows(arrays, row, row + 1) for row in left]
            pieces.append((_stack(shares, count), num_left))
        return pieces

    def _split_replica_batches(self, group: list[PyTree]) -> list[tuple[PyTree, int]]:
        """Returns a piece for each size of the batches that replicas take."""
        count = self._num_replicas
        by_size: dict[int, list[PyTree]] = {}
        for batch in group:
            by_size.setdefault(count_rows(batch), []).append(batch)
        fits = len(by_size) == 1 and len(group) == count
        if not self._in_pieces and not fits:
            sizes = ", ".join(str(count_rows(batch)) for batch in group)
            end = " and the data ends there" if len(group) < count else ""
            raise BatchSizeError(
                f"{count} replicas take one batch each, all of one size, but the "
                f"batches have {sizes} examples{end}. "
                "Batch the data with `drop_remainder=True` and a number of batches "
                f"that is a multiple of {count}. Or pass options to "
                "`strategy.distribute_datasets_from_function(dataset_fn, options)`: "
                f"{_FIXES}."
            )
        return [(_stack(batches, count), len(batches)) for batches in by_size.values()]


def _mark(batches: list[PyTree]) -> str:
    """Returns a checksum of the first and the last example of each batch."""
    checksum = 0
    for leaf in jax.tree.leaves(batches):
        first = leaf[:1]
        last = leaf[-1:]
        for row in (first, last):
            array = np.ascontiguousarray(row).reshape(-1)
            octets = array.view(np.uint8).data
            checksum = zlib.crc32(octets, checksum)
    return f"{checksum:08x}"


def _take_rows(arrays: PyTree, start: int, stop: int) -> PyTree:
    return jax.tree.map(lambda leaf: leaf[start:stop], arrays)


def _add_replica_axis(arrays: PyTree, count: int) -> PyTree:
    """Divides batches into `count` equal shares, on a new first axis."""

    def divide(leaf: np.ndarray) -> np.ndarray:
        num_rows, *others = leaf.shape
        return leaf.reshape(count, num_rows // count, *others)

    return jax.tree.map(divide, arrays)


def _concatenate(batches: Sequence[PyTree]) -> PyTree:
    if len(batches) == 1:
        return batches[0]
    return jax.tree.map(lambda *leaves: np.concatenate(leaves), *batches)


def _stack(batches: Sequence[PyTree], num_replicas: int) -> PyTree:
    """Stacks batches; replicas without one get a copy of the first."""
    num_missing = num_replicas - len(batches)
    copies = [batches[0]] * num_missing
    return jax.tree.map(lambda *leaves: np.stack(leaves), *batches, *copies)


def _pad(arrays: PyTree, size: int, num_seen: int) -> PyTree:
    """Fills a batch with copies of its last row; the mask shows `num_seen` rows."""
    numbers = np.arange(size)
    num_rows = count_rows(arrays)
    if num_rows < size:
        last = num_rows - 1
        rows = np.minimum(numbers, last)
        arrays = jax.tree.map(lambda leaf: np.take(leaf, rows, axis=0), arrays)
    return add_mask(arrays, numbers < num_seen)
