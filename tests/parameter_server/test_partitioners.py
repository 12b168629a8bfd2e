"""Tests of the number of parts that partitioners return."""

import re

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st

from armillary.distribute.partitioners import (
    FixedShardsPartitioner,
    MaxSizePartitioner,
    MinSizePartitioner,
)
from armillary.parameter_server._variables import Variables, cut_rows
from armillary.state._lift import State


@pytest.mark.parametrize(
    ("partitioner", "shape", "counts"),
    [
        (FixedShardsPartitioner(2), (10, 3), [2, 1]),
        (FixedShardsPartitioner(4), (3,), [3]),
        (FixedShardsPartitioner(2), (), []),
        # The examples of TensorFlow's documentation: 4 bytes an element.
        (MinSizePartitioner(4, max_shards=2), (6, 1), [2, 1]),
        (MinSizePartitioner(4, max_shards=10), (6, 1), [6, 1]),
        (MinSizePartitioner(1 << 20, max_shards=10), (6, 1), [1, 1]),
        (MaxSizePartitioner(4), (6, 1), [6, 1]),
        (MaxSizePartitioner(4, max_shards=2), (6, 1), [2, 1]),
        (MaxSizePartitioner(1024), (6, 1), [1, 1]),
        (MaxSizePartitioner(1), (6, 2), [6, 1]),
    ],
)
def test_counts_equal_the_counts_of_tensorflow(partitioner, shape, counts):
    assert partitioner(shape, np.float32) == counts


@given(st.integers(1, 200), st.integers(1, 20))
def test_parts_cover_all_rows_once_and_differ_by_at_most_one(rows, count):
    count = min(rows, count)
    ranges = cut_rows(rows, count)
    assert [row for start, stop in ranges for row in range(start, stop)] == list(
        range(rows)
    )
    sizes = [stop - start for start, stop in ranges]
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("counts", [None, [2], [2, 2], [0, 1], [2.0, 1]])
def test_counts_are_checked_for_variables_without_an_optimizer_too(counts):
    variables = Variables(1, lambda shape, dtype, axis: counts)
    state = State([(nnx.Variable(jnp.zeros((4, 3))), "total")])
    message = rf"`variable_partitioner` returned {re.escape(repr(counts))} for total of"
    for _ in range(2):  # Nothing is half done after the first.
        with pytest.raises(ValueError, match=message):
            variables.adopt(state)
