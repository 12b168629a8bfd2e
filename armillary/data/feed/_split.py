"""Rules that turn source batches into pieces that the replicas can share.

A *group* is what becomes one distributed batch: one global batch, or one batch for each
replica. A group that fits becomes one piece. What happens to any other follows from
`InputOptions.remainder`. With `"exact"` it is one piece for fewer replicas, each on
several devices; in an evaluation, where steps add up, it is several smaller pieces::

    global batch of 10 rows on 4 replicas      5 rows for each of 2 replicas
      in an evaluation                         piece 1: rows 0-7, 2 for each replica
                                               piece 2: rows 8-9, 1 for replicas 0 and 1
    replica batches of 8, 8 and 3 rows         19 rows for 1 replica
      (then the data ends), in an evaluation   piece 1: 8 rows for replicas 0 and 1
                                               piece 2: 3 rows for replica 0
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from armillary._logging import logger
from armillary.data._layout import (
    Active,
    Remainder,
    hosted_replicas,
    name_fitting_sizes,
)
from armillary.data.feed._position import BatchStream, Position, SourceBatch
from armillary.errors import BatchSizeError
from armillary.typing import PyTree

MASK = "mask"
_EXACT_FIX = '`InputOptions(remainder="exact")` to run it on fewer replicas, '
_OTHER_FIXES = (
    '`InputOptions(remainder="drop")` to leave examples out, or '
    '`InputOptions(remainder="pad")` to fill up and get a `mask`'
)


@dataclass(frozen=True, eq=False)
class HostBatch:
    """One distributed batch, or a piece of one, still in host memory.

    Args:
        arrays: Pytree of NumPy arrays in the layout's shape, with the rows of the
            replicas of this process.
        num_active: Replicas that have data. The rows of the others are copies, so that
            all values are finite.
        num_replicas: Replicas that share it: those of the layout, or a number that
            divides theirs.
        position: The position after it.
        is_last: Whether it is the last piece of its group.
    """

    arrays: PyTree
    num_active: Active
    num_replicas: int
    position: Position
    is_last: bool


@dataclass(frozen=True)
class Splitter:
    """Splits the batches of a stream between replicas.

    Args:
        num_replicas: Replicas that share a batch.
        stacked: Whether pieces get a replica axis. Without one, any size fits.
        per_replica_batches: Whether a source batch is one replica's, not a global one.
        remainder: As in `InputOptions`.
        exact: Whether groups that do not fit become several pieces, unless `remainder`
            is `"drop"` or `"pad"`.
        local: The replicas whose rows are wanted, `None` for all.
        has_peers: Whether other processes give the rows of other replicas.
    """

    num_replicas: int
    stacked: bool
    per_replica_batches: bool
    remainder: Remainder
    exact: bool
    local: range | None = None
    has_peers: bool = False

    @property
    def _num_shares(self) -> int:
        return self.num_replicas if self.stacked else 1

    @property
    def _narrows(self) -> bool:
        """Whether a group that does not fit is one piece for fewer replicas."""
        return self.stacked and self.remainder == "exact" and not self.exact

    @property
    def _group_size(self) -> int:
        return self._num_shares if self.per_replica_batches else 1

    def split(self, stream: BatchStream) -> Iterator[HostBatch]:
        """Yields all pieces of `stream`.

        The position of a piece that is not the last of its group is the one before the
        group, so that a program which stops between two pieces runs both again.
        """
        before, is_first = stream.position, True
        for group in self._read_groups(stream):
            pieces = self._split_group(group, stream)
            if is_first and self._narrows:
                self._warn_of_waste(group, pieces, stream)
            is_first = False
            for index, (arrays, num_active) in enumerate(pieces, start=1):
                is_last = index == len(pieces)
                count = _num_rows(arrays) if self.stacked else self.num_replicas
                if self.local is not None:
                    own = hosted_replicas(self.local, self.num_replicas, count)
                    arrays = _take_rows(arrays, own.start, own.stop)
                position = stream.position if is_last else before
                yield HostBatch(arrays, num_active, count, position, is_last)
            before = stream.position

    def get_global_spec(self, spec: PyTree, full_size: int) -> PyTree:
        """Returns `spec`, of one source batch, as that of a distributed batch."""
        first = jax.tree.leaves(spec)[0].shape[0]
        if self.remainder == "pad":
            first = self._round_up(max(first, full_size))
            mask = jax.ShapeDtypeStruct((first,), np.dtype(bool))
            spec = add_mask(spec, mask)
        elif self.remainder == "drop":
            first = self._round_down(first, full_size)
        num_rows = first * self._num_shares if self.per_replica_batches else first
        return jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct((num_rows, *leaf.shape[1:]), leaf.dtype),
            spec,
        )

    def _read_groups(self, stream: BatchStream) -> Iterator[list[SourceBatch]]:
        group: list[SourceBatch] = []
        for batch in stream:
            full_size = stream.full_size or batch.num_rows
            if self.remainder == "drop":
                if batch.num_rows < full_size:
                    continue
                num_rows = self._round_down(batch.num_rows, full_size)
                batch = SourceBatch(_take_rows(batch.arrays, 0, num_rows), num_rows)
            group.append(batch)
            if len(group) == self._group_size:
                yield group
                group = []
        if group and self.remainder != "drop":
            yield group

    def _round_down(self, num_rows: int, full_size: int) -> int:
        # So many rows of a batch `"drop"` keeps.
        if self.per_replica_batches:
            return full_size
        if num_rows < self._num_shares:
            raise BatchSizeError(
                f"A batch has {num_rows} examples, fewer than the {self._num_shares} "
                'replicas, so that `InputOptions(remainder="drop")` would drop it '
                f"whole. Use a batch size of at least {self._num_shares}, or "
                '`InputOptions(remainder="pad")`.'
            )
        return num_rows - num_rows % self._num_shares

    def _round_up(self, num_rows: int) -> int:
        """Returns the size to which `"pad"` fills a batch."""
        if self.per_replica_batches:
            return num_rows
        return -(-num_rows // self._num_shares) * self._num_shares

    def _split_group(
        self, group: list[SourceBatch], stream: BatchStream
    ) -> list[tuple[PyTree, int]]:
        """Returns the pieces of one group, each with its number of active replicas."""
        full_size = stream.full_size or group[0].num_rows
        if self.remainder == "pad":
            size = self._round_up(max(full_size, *(batch.num_rows for batch in group)))
            num_missing = self._group_size - len(group)
            empty = [_pad(group[-1], size, 0)] * num_missing
            group = [_pad(batch, size, batch.num_rows) for batch in group] + empty
        if not self.stacked:
            return [(group[0].arrays, self.num_replicas)]
        if self._narrows:
            return [self._share(group)]
        if self.per_replica_batches:
            return self._split_replica_batches(group)
        if not self.exact and group[0].num_rows % self.num_replicas:
            raise self._unequal_shares(group[0].num_rows, full_size, stream)
        return self._split_global_batch(group[0])

    def _unequal_shares(
        self, num_rows: int, full_size: int, stream: BatchStream
    ) -> BatchSizeError:
        """Returns the error for a batch that the replicas cannot share equally."""
        num_replicas = self.num_replicas
        rule = (
            f"which {num_replicas} replicas cannot share equally ({num_rows} % "
            f"{num_replicas} = {num_rows % num_replicas})"
        )
        # A short batch says nothing against a batch size that fits.
        if full_size % num_replicas == 0 and stream.peek() is None:
            return BatchSizeError(
                f"The last batch of the data has the {num_rows} examples that were "
                f"left, {rule}; the batches before it have {full_size}. Use "
                f"{self._fixes}, or batch the data with `drop_remainder=True`."
            )
        return BatchSizeError(
            f"A batch has {num_rows} examples, {rule}. Use a batch size that is a "
            f"multiple of {num_replicas}, such as "
            f"{name_fitting_sizes(num_rows, num_replicas)}, or {self._fixes}."
        )

    @property
    def _fixes(self) -> str:
        return _OTHER_FIXES if self.has_peers else f"{_EXACT_FIX}{_OTHER_FIXES}"

    def _share(self, group: list[SourceBatch]) -> tuple[PyTree, int]:
        """Returns all rows of a group as one piece, for the most replicas that fit."""
        arrays = group[0].arrays
        if len(group) > 1:
            parts = [batch.arrays for batch in group]
            arrays = jax.tree.map(lambda *leaves: np.concatenate(leaves), *parts)
        num_sharing = math.gcd(_num_rows(arrays), self.num_replicas)
        return _add_replica_axis(arrays, num_sharing), num_sharing

    def _warn_of_waste(
        self,
        group: list[SourceBatch],
        pieces: list[tuple[PyTree, int]],
        stream: BatchStream,
    ) -> None:
        """Tells if not the last batches, but all, run on fewer replicas."""
        num_rows, num_sharing = group[0].num_rows, pieces[0][1]
        if num_sharing < self.num_replicas and num_rows == stream.full_size:
            logger.warning(
                "Batches of %d examples run on %d of %d replicas, and the other "
                "devices do the same work again. With a batch size that is a multiple "
                "of %d, all would share it.",
                num_rows,
                num_sharing,
                self.num_replicas,
                self.num_replicas,
            )

    def _split_global_batch(self, batch: SourceBatch) -> list[tuple[PyTree, int]]:
        num_replicas = self.num_replicas
        share, num_left = divmod(batch.num_rows, num_replicas)
        pieces: list[tuple[PyTree, int]] = []
        if share:
            rows = _take_rows(batch.arrays, 0, share * num_replicas)
            pieces.append((_add_replica_axis(rows, num_replicas), num_replicas))
        if num_left:
            rows = _take_rows(batch.arrays, share * num_replicas, batch.num_rows)
            shares = [_take_rows(rows, index, index + 1) for index in range(num_left)]
            pieces.append((_stack(shares, num_replicas), num_left))
        return pieces

    def _split_replica_batches(
        self, group: list[SourceBatch]
    ) -> list[tuple[PyTree, int]]:
        num_replicas = self.num_replicas
        by_size: dict[int, list[PyTree]] = {}
        for batch in group:
            by_size.setdefault(batch.num_rows, []).append(batch.arrays)
        if not self.exact and (len(by_size) > 1 or len(group) < num_replicas):
            sizes = ", ".join(str(batch.num_rows) for batch in group)
            raise BatchSizeError(
                f"{num_replicas} replicas take one batch each, of one size, but the "
                f"batches have {sizes} examples"
                f"{' and the data ends there' if len(group) < num_replicas else ''}. "
                "Batch the data with `drop_remainder=True` and a number of batches "
                f"that is a multiple of {num_replicas}, or use {self._fixes}."
            )
        return [
            (_stack(batches, num_replicas), len(batches))
            for batches in by_size.values()
        ]


def _num_rows(arrays: PyTree) -> int:
    return len(jax.tree.leaves(arrays)[0])


def _take_rows(arrays: PyTree, start: int, stop: int) -> PyTree:
    return jax.tree.map(lambda leaf: leaf[start:stop], arrays)


def _add_replica_axis(arrays: PyTree, num_replicas: int) -> PyTree:
    return jax.tree.map(
        lambda leaf: leaf.reshape(
            num_replicas, len(leaf) // num_replicas, *leaf.shape[1:]
        ),
        arrays,
    )


def _stack(batches: Sequence[PyTree], num_replicas: int) -> PyTree:
    """Stacks batches; replicas without one get a copy of the first."""
    filled = [*batches, *[batches[0]] * (num_replicas - len(batches))]
    return jax.tree.map(lambda *leaves: np.stack(leaves), *filled)


def _pad(batch: SourceBatch, size: int, num_seen: int) -> SourceBatch:
    """Fills `batch` with copies of its last row; the mask shows `num_seen` rows."""
    arrays = batch.arrays
    if batch.num_rows < size:
        rows = np.minimum(np.arange(size), batch.num_rows - 1)
        arrays = jax.tree.map(lambda leaf: np.take(leaf, rows, axis=0), arrays)
    return SourceBatch(add_mask(arrays, np.arange(size) < num_seen), size)


def get_mask(batch: PyTree) -> Any:
    """Returns the leaf that `remainder="pad"` has added to a batch."""
    return batch[MASK] if isinstance(batch, dict) else batch[-1]


def add_mask(batch: PyTree, mask: object) -> PyTree:
    """Returns `batch` with the leaf that `remainder="pad"` adds."""
    if type(batch) in (tuple, list):
        return type(batch)([*batch, mask])
    if not isinstance(batch, dict):
        raise TypeError(
            f"The batches are of type {type(batch).__name__}, but "
            '`InputOptions(remainder="pad")` adds a mask to each, as the entry '
            f"`{MASK}` of a dictionary or as the last item of a tuple. Return one of "
            'these from the data set, or use `remainder="exact"` or `"drop"`.'
        )
    if MASK in batch:
        raise ValueError(
            f"The batches have a leaf `{MASK}` already, which `InputOptions(remainder="
            '"pad")` adds to each. Rename it in the data set, or use '
            '`remainder="exact"` or `"drop"`.'
        )
    return {**batch, MASK: mask}
