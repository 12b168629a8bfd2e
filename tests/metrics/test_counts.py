"""Counts stay exact where floats and integers of 32 bits do not."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from armillary.metrics._counts import Counts, FloatSum
from tests.problems import make_strategy

BOUNDED = settings(deadline=None, derandomize=True)


@settings(BOUNDED, max_examples=25)
@given(numbers=st.lists(st.integers(0, 2**31 - 1), max_size=6))
def test_counts_add_up(numbers):
    counts = Counts.zeros(2)
    for number in numbers:
        counts.add(jnp.array([number, number // 3], jnp.int32))

    assert counts.read().dtype == np.int64
    assert counts.read().tolist() == [sum(numbers), sum(n // 3 for n in numbers)]


@pytest.mark.slow
@pytest.mark.parametrize("start", [2**24 - 1, 2**31 - 1, 2**62 + 12345])
@pytest.mark.parametrize("num_replicas", [1, 4])
def test_replicas_count_on_beyond_what_floats_and_integers_hold(num_replicas, start):
    strategy = make_strategy(num_replicas)
    parts = [start % 2**16, (start >> 16) % 2**16, start >> 32]
    counts = Counts(jnp.array(parts, jnp.int32))

    def step_fn(numbers):
        counts.add(numbers)

    numbers = strategy.distribute_values_from_function(
        lambda context: jnp.int32(65_535 + context.replica_id_in_sync_group)
    )
    for _ in range(3):
        strategy.run(step_fn, args=(numbers,))

    added = sum(65_535 + replica for replica in range(num_replicas))
    assert int(counts.read()) == start + 3 * added


floats = st.floats(0, 2.0**120, width=32)


@pytest.mark.slow
@settings(BOUNDED, max_examples=40)
@given(values=st.lists(floats, max_size=8), seed=st.integers(0, 3))
def test_a_sum_of_floats_is_exact_in_any_order(values, seed):
    total, other = FloatSum.zeros(256), FloatSum.zeros(256)
    for value in values:
        total.add_float(jnp.float32(value))
    for value in np.random.default_rng(seed).permutation(values):
        other.add_float(jnp.float32(value))

    assert total.read_float() == pytest.approx(math.fsum(values), rel=1e-14, abs=0)
    np.testing.assert_array_equal(total[...], other[...])


@pytest.mark.parametrize("value", [np.inf, np.nan, -np.inf])
def test_a_sum_of_what_is_not_finite_is_not_a_number(value):
    total = FloatSum.zeros(256)
    total.add_float(jnp.float32(value))
    assert math.isnan(total.read_float())


def test_counts_are_read_outside_of_traced_functions():
    def compute(value):
        return Counts(value).read()

    with pytest.raises(TypeError, match=r"(?s)computed in a function.*`eval_end`"):
        jax.jit(compute)(jnp.zeros(3, jnp.int32))
