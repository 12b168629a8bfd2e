"""Numbers of parts of variables (`tf.distribute.experimental.partitioners`)."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from armillary import _checks, _traceback

__all__ = [
    "FixedShardsPartitioner",
    "MaxSizePartitioner",
    "MinSizePartitioner",
    "Partitioner",
]


class Partitioner:
    """Decides how variables are cut along their first axis.

    You can also use any callable with the same arguments and the same result.
    """

    def __call__(self, shape: Sequence[int], dtype: Any, axis: int = 0) -> list[int]:
        """Returns the number of parts along each axis, such as `[2, 1]`.

        Args:
            shape: Shape of the variable.
            dtype: Its dtype.
            axis: The axis to cut, which must be 0.
        """
        counts = [1] * len(shape)
        if shape:
            # Each part needs a row, and a variable without rows has one empty part.
            count = min(self._count(shape, dtype, axis), shape[axis])
            counts[axis] = max(1, count)
        return counts

    def _count(self, shape: Sequence[int], dtype: Any, axis: int) -> int:
        """Returns the number of parts, if the variable has as many rows."""
        raise NotImplementedError


class FixedShardsPartitioner(Partitioner):
    """Cuts every variable into the same number of parts.

    Args:
        num_shards: The number of parts. A variable with fewer rows has fewer parts.
    """

    def __init__(self, num_shards: int) -> None:
        self._num_shards = _checks.check_positive_int("num_shards", num_shards)

    def _count(self, shape: Sequence[int], dtype: Any, axis: int) -> int:
        del shape, dtype, axis
        return self._num_shards


class MinSizePartitioner(Partitioner):
    """Cuts a variable into as many parts as possible with a minimum size.

    Args:
        min_shard_bytes: The smallest size of a part, in bytes. A smaller variable stays
            whole.
        max_shards: The largest number of parts.
    """

    def __init__(self, min_shard_bytes: int = 256 << 10, max_shards: int = 1) -> None:
        self._min_bytes = _checks.check_positive_int("min_shard_bytes", min_shard_bytes)
        self._max_shards = _checks.check_positive_int("max_shards", max_shards)

    def _count(self, shape: Sequence[int], dtype: Any, axis: int) -> int:
        del axis
        num_bytes = math.prod(shape) * np.dtype(dtype).itemsize
        return min(self._max_shards, num_bytes // self._min_bytes)


class MaxSizePartitioner(Partitioner):
    """Cuts a variable into as few parts as possible with a maximum size.

    Args:
        max_shard_bytes: The largest size of a part, in bytes. A part has at least one
            row, which may be larger.
        max_shards: The largest number of parts, even if they are then larger; `None`
            for no limit.
    """

    def __init__(self, max_shard_bytes: int, max_shards: int | None = None) -> None:
        self._max_bytes = _checks.check_positive_int("max_shard_bytes", max_shard_bytes)
        if max_shards is not None:
            _checks.check_positive_int("max_shards", max_shards)
        self._max_shards = max_shards

    def _count(self, shape: Sequence[int], dtype: Any, axis: int) -> int:
        row_bytes = math.prod(shape[1:]) * np.dtype(dtype).itemsize
        rows_per_part = self._max_bytes // max(row_bytes, 1)
        rows_per_part = max(1, rows_per_part)
        count = math.ceil(shape[axis] / rows_per_part)
        return count if self._max_shards is None else min(count, self._max_shards)


_traceback.mark_public(globals())
