"""Tests that counts stay exact beyond 32-bit floats and integers."""

import fractions
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

from armillary.metrics._counts import Counts, FloatSum
from armillary.metrics._parts import Number, _join_number
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


@pytest.mark.parametrize("num_integers", [65, 256])
@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([np.inf, 1.0], np.inf),
        ([-np.inf, 1.0, -np.inf], -np.inf),
        ([np.nan], np.nan),
        ([np.inf, -np.inf], np.nan),
        ([3.0e38] * 3, 9.0e38),
    ],
)
def test_values_that_are_not_finite_add_up_as_in_numpy(num_integers, values, expected):
    total = FloatSum.zeros(num_integers)
    for value in values:
        total.add_float(jnp.float32(value))
    assert total.read_float() == pytest.approx(expected, rel=1e-7, nan_ok=True)


def test_a_product_that_no_float_holds_is_infinite():
    total = FloatSum.zeros(2, 65)
    total.add_float(jnp.array([3e38, -3e38], jnp.float32), 16)
    assert total.read_float().tolist() == [np.inf, -np.inf]


@pytest.mark.slow
@settings(BOUNDED, max_examples=40)
@given(
    values=st.lists(st.floats(-(2.0**90), 2.0**90, width=32), min_size=1, max_size=8),
    times=st.integers(0, 2**31 - 1),
)
def test_sums_of_both_signs_are_exact(values, times):
    total = FloatSum.zeros(65)
    for value in values:
        total.add_float(jnp.float32(value), times)

    exact = sum(map(fractions.Fraction, values)) * times
    assert total.read_float() == pytest.approx(float(exact), rel=1e-14, abs=1e-300)


def test_a_sum_stays_exact_where_large_values_cancel():
    total = FloatSum.zeros(65)
    for value in (1e30, 1.0, -1e30):
        total.add_float(jnp.float32(value))
    assert total.read_float() == 1.0


def test_counts_may_be_negative():
    counts = Counts.zeros()
    for number in (-(2**31) + 1, 5, -(2**31) + 1):
        counts.add(jnp.int32(number))
    assert int(counts.read()) == -(2**32) + 7


@pytest.mark.parametrize("total", [2**31 + 8, -(2**31) - 8])
def test_a_total_that_its_integers_cannot_hold_becomes_a_float(total):
    number = Number(nnx.metrics.MetricState, (2,), np.dtype(np.int32))
    joined = _join_number(number, np.array([total, 5]))
    assert joined.dtype == np.float32
    assert joined.tolist() == [np.float32(total), 5]
    assert _join_number(number, np.array([-(2**31), 5])).dtype == np.int32


def test_counts_are_read_outside_of_traced_functions():
    def compute(value):
        return Counts(value).read()

    with pytest.raises(TypeError, match=r"(?s)computed in a function.*`eval_end`"):
        jax.jit(compute)(jnp.zeros(3, jnp.int32))
