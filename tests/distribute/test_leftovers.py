"""Tests of the last pieces of an evaluation, when some replicas have no data."""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import armillary
from armillary import get_replica_context
from armillary.distribute import VariableAggregation
from tests.problems import Notes

# The values in rows without data must not matter.
ROWS = np.asarray([[1, 2], [3, 5], [np.nan, np.inf], [np.nan, np.nan]], np.float32)


@pytest.fixture
def rows(strategy, put_rows):
    return put_rows(strategy, ROWS, num_active=2)


def test_metrics_count_replicas_with_data(strategy, rows):
    metric = nnx.metrics.Average()
    metric.update(values=jnp.asarray([10.0]))
    strategy.run(lambda x: metric.update(values=x), args=(rows,))
    assert int(metric.count[...]) == 1 + 4
    assert float(metric.total[...]) == 10 + 11


@pytest.mark.parametrize(
    ("aggregation", "expected"),
    [
        (VariableAggregation.SUM, [100 + 4, 100 + 7]),
        (VariableAggregation.MEAN, [102, 103.5]),
        (VariableAggregation.ONLY_FIRST_REPLICA, [101, 102]),
    ],
)
def test_variables_ignore_replicas_without_data(strategy, rows, aggregation, expected):
    variable = nnx.Variable(jnp.full(2, 100.0), aggregation=aggregation)

    def step_fn(x):
        variable[...] = variable[...] + x

    strategy.run(step_fn, args=(rows,))
    np.testing.assert_array_equal(variable[...], expected)


@pytest.mark.parametrize(
    ("op", "expected"),
    [("sum", [4, 7]), ("mean", [2, 3.5]), ("max", [3, 5]), ("min", [1, 2])],
)
def test_reductions_ignore_replicas_without_data(strategy, rows, op, expected):
    reduced = strategy.run(
        lambda x: get_replica_context().all_reduce(op, x), args=(rows,)
    )
    for row in strategy.local_results(reduced):
        np.testing.assert_array_equal(row, expected)
    outside = strategy.run(lambda x: x * 1, args=(rows,))
    np.testing.assert_array_equal(strategy.reduce(op, outside), expected)


def test_gathers_ignore_replicas_without_data(strategy, rows):
    np.testing.assert_array_equal(strategy.gather(rows, axis=0), [1, 2, 3, 5])
    inside = strategy.run(
        lambda x: get_replica_context().all_gather(x, 0), args=(rows,)
    )
    for row in strategy.local_results(inside):
        np.testing.assert_array_equal(row, [1, 2, 3, 5])


def test_a_full_batch_and_leftovers_are_two_programs(strategy, put_rows, rows):
    metric, traced = nnx.metrics.Average(), Notes()
    full = put_rows(strategy, np.ones((4, 2), np.float32))

    @armillary.function
    def step(x):
        traced.append(None)
        strategy.run(lambda x: metric.update(values=x), args=(x,))

    for batch in (full, rows, full, rows):
        step(batch)
    assert len(traced) == 2
    assert int(metric.count[...]) == 2 * (8 + 4)
    assert float(metric.total[...]) == 2 * (8 + 11)
