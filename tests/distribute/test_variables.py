"""Tests of each kind of variable that several replicas write."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

from armillary import MirroredStrategy, get_replica_context
from armillary.distribute import VariableAggregation, VariableSynchronization
from armillary.errors import ReplicaMismatchError
from tests.tiers import slow_after_first

IDS = [1.0, 2.0, 3.0, 4.0]


@pytest.fixture
def ids(strategy, put_rows):
    return put_rows(strategy, IDS)


def add(variable, amount):
    variable[...] = variable[...] + amount


def test_a_metric_that_grows_by_a_constant_counts_every_replica(strategy):
    metric = nnx.metrics.Average()
    for _ in range(2):
        strategy.run(lambda: metric.update(values=jnp.ones(())))
    assert int(metric.count[...]) == 8
    assert float(metric.total[...]) == 8


def test_batch_statistics_are_averaged(strategy):
    norm = nnx.BatchNorm(2, momentum=0.5, rngs=nnx.Rngs(0))
    rows = np.random.default_rng(0).normal(size=(8, 2)).astype(np.float32)
    (batch,) = strategy.distribute_dataset([rows])
    strategy.run(norm, args=(batch,))
    parts = rows.reshape(4, 2, 2)
    mean = 0.5 * parts.mean(1).mean(0)
    var = 0.5 + 0.5 * parts.var(1).mean(0)
    np.testing.assert_allclose(norm.mean[...], mean, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(norm.var[...], var, rtol=1e-5)


@slow_after_first(
    ("aggregation", "expected", "of_a_constant"),
    [
        (VariableAggregation.SUM, 100 + 10, 104),
        (VariableAggregation.MEAN, 102.5, 101),
        (VariableAggregation.ONLY_FIRST_REPLICA, 101, 101),
        (VariableAggregation.NONE, None, 101),
    ],
)
def test_aggregation(strategy, ids, aggregation, expected, of_a_constant):
    variable = nnx.Variable(jnp.asarray(100.0), aggregation=aggregation)
    strategy.run(lambda: add(variable, 1))
    assert float(variable[...]) == of_a_constant
    variable[...] = jnp.asarray(100.0)
    if expected is None:
        with pytest.raises(ReplicaMismatchError, match=r"variable \(plain, mirrored\)"):
            strategy.run(lambda x: add(variable, x), args=(ids,))
    else:
        strategy.run(lambda x: add(variable, x), args=(ids,))
        assert float(variable[...]) == expected


@pytest.mark.parametrize(
    ("value", "aggregation", "message"),
    [
        (jnp.zeros((), bool), VariableAggregation.SUM, "bool, which has no sum"),
        (jnp.zeros((), bool), VariableAggregation.MEAN, "bool, which has no mean"),
        (jax.random.key(0), VariableAggregation.SUM, "which has no sum"),
        (
            jnp.zeros(()),
            "SUM",
            "must be a member of `armillary.distribute.VariableAggregation`",
        ),
    ],
)
def test_an_aggregation_without_a_meaning_is_an_error(
    strategy, value, aggregation, message
):
    variable = nnx.Variable(value, aggregation=aggregation)
    with pytest.raises(ValueError, match=message):
        strategy.run(lambda: variable[...])


AGGREGATIONS = [(name, VariableAggregation[name]) for name in ("SUM", "MEAN")]
AGGREGATIONS.append(("ONLY_FIRST_REPLICA", VariableAggregation.ONLY_FIRST_REPLICA))


@pytest.mark.parametrize(("name", "aggregation"), AGGREGATIONS)
@pytest.mark.parametrize("when", ["AUTO", "ON_READ"])
def test_on_read_values_are_combined_when_run_ends(
    strategy, ids, name, aggregation, when
):
    variable = nnx.Variable(
        jnp.asarray(100.0),
        aggregation=aggregation,
        synchronization=VariableSynchronization[when],
    )
    strategy.run(lambda x: add(variable, x), args=(ids,))
    expected = {"SUM": 110, "MEAN": 102.5, "ONLY_FIRST_REPLICA": 101}
    assert float(variable[...]) == expected[name]


def on_write(name, value=100.0):
    return nnx.Variable(
        jnp.asarray(value),
        synchronization=VariableSynchronization.ON_WRITE,
        aggregation=VariableAggregation[name],
    )


@pytest.mark.parametrize(("name", "aggregation"), AGGREGATIONS)
def test_on_write_values_are_equal_at_every_read(strategy, ids, name, aggregation):
    variable = on_write(name)

    def step_fn(x):
        variable[...] = x
        return variable[...]

    expected = {"SUM": 10, "MEAN": 2.5, "ONLY_FIRST_REPLICA": 1}[name]
    for _ in range(2):
        found = strategy.run(step_fn, args=(ids,))
        assert found.is_shared and float(found.array) == expected
        assert float(variable[...]) == expected
    assert "on_set_value" not in variable.get_metadata()


@pytest.mark.parametrize("name", ["SUM", "MEAN", "ONLY_FIRST_REPLICA", "NONE"])
def test_on_write_values_are_read_whole_before_a_write(strategy, name):
    variable = on_write(name)
    found = strategy.run(lambda: variable[...])
    assert found.is_shared and float(found.array) == 100


@pytest.mark.parametrize(
    ("name", "expected"), [("MEAN", 105), ("ONLY_FIRST_REPLICA", 102)]
)
def test_on_write_values_may_be_written_again(strategy, ids, name, expected):
    variable = on_write(name)

    def step_fn(x):
        add(variable, x)
        add(variable, x)

    strategy.run(step_fn, args=(ids,))
    assert float(variable[...]) == expected


def test_a_sum_that_is_written_after_a_read_is_an_error(strategy, ids):
    variable = on_write("SUM")
    with pytest.raises(ValueError, match=r"variable is ON_WRITE .* Leave `synchro"):
        strategy.run(lambda x: add(variable, x), args=(ids,))
    assert "on_set_value" not in variable.get_metadata()


def test_writes_in_a_transformation_of_nnx_are_combined(strategy, ids):
    variable = on_write("MEAN")

    @nnx.jit
    def write(variable, x):
        variable[...] = x

    strategy.run(lambda x: write(variable, x), args=(ids,))
    assert float(variable[...]) == 2.5


def test_hooks_of_the_user_come_before_the_combination(strategy, ids):
    variable = on_write("MEAN")
    variable.set_metadata("on_set_value", lambda _, value: value * 2)
    strategy.run(lambda x: variable.set_value(x), args=(ids,))
    assert float(variable[...]) == 5
    assert callable(variable.get_metadata("on_set_value"))


def test_on_write_without_an_aggregation_is_mirrored(strategy, ids):
    variable = on_write("NONE")
    strategy.run(lambda: add(variable, 1))
    assert float(variable[...]) == 101
    with pytest.raises(ReplicaMismatchError, match=r"variable \(plain, mirrored\)"):
        strategy.run(lambda x: add(variable, x), args=(ids,))


def test_random_state_may_be_on_read(strategy):
    rngs = nnx.Rngs(0)
    rngs.default.key.set_metadata("synchronization", VariableSynchronization.ON_READ)
    drawn = strategy.run(lambda: jax.random.uniform(rngs()))
    assert len(set(map(float, strategy.local_results(drawn)))) == 4


def test_the_synchronization_of_a_variable_is_a_part_of_its_program(strategy, ids):
    variable = nnx.Variable(jnp.asarray(0.0), aggregation=VariableAggregation.MEAN)

    def step_fn(x):
        variable[...] = x
        return variable[...]

    assert not strategy.run(step_fn, args=(ids,)).is_shared
    variable.set_metadata("synchronization", VariableSynchronization.ON_WRITE)
    assert strategy.run(step_fn, args=(ids,)).is_shared


@pytest.mark.parametrize(
    ("synchronization", "aggregation", "message"),
    [
        (VariableSynchronization.NONE, None, "is NONE, but the values that"),
        (
            VariableSynchronization.NONE,
            VariableAggregation.SUM,
            "is NONE, but the values that",
        ),
        (VariableSynchronization.ON_READ, None, "is ON_READ .* `aggregation` is"),
        (
            VariableSynchronization.ON_READ,
            VariableAggregation.NONE,
            "is ON_READ .* `aggregation` is",
        ),
        ("ON_READ", None, "must be a member of .*distribute.VariableSynchronization"),
    ],
)
@pytest.mark.parametrize("num_replicas", [1, 4])
def test_a_synchronization_without_a_meaning_is_an_error(
    num_replicas, synchronization, aggregation, message
):
    strategy = MirroredStrategy(jax.devices()[:num_replicas])
    variable = nnx.Variable(
        jnp.zeros(()), synchronization=synchronization, aggregation=aggregation
    )
    with pytest.raises(ValueError, match=f"`synchronization` of variable .*{message}"):
        strategy.run(lambda: variable[...])


def test_an_annotation_goes_before_the_kind(strategy, ids):
    metric = nnx.metrics.MetricState(
        jnp.asarray(0.0), aggregation=VariableAggregation.MEAN
    )
    strategy.run(lambda x: add(metric, x), args=(ids,))
    assert float(metric[...]) == 2.5


def test_half_precision_means_do_not_overflow(strategy, put_rows):
    variable = nnx.Variable(
        jnp.zeros((), jnp.float16), aggregation=VariableAggregation.MEAN
    )
    rows = put_rows(strategy, np.full(4, 40000, np.float16))
    strategy.run(lambda x: variable.set_value(x), args=(rows,))
    assert variable[...].dtype == jnp.float16 and float(variable[...]) == 40000


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(
    data=st.data(),
    dtype=st.sampled_from([np.int8, np.uint8, np.int16, np.int32, np.uint32]),
)
def test_integer_means_are_rounded_down(data, dtype):
    info = np.iinfo(dtype)
    integers = st.integers(int(info.min), int(info.max))
    values = data.draw(st.lists(integers, min_size=4, max_size=4))
    num_active = data.draw(st.integers(1, 4))
    strategy = MirroredStrategy(jax.devices()[:4])
    variable = nnx.Variable(jnp.zeros((), dtype), aggregation=VariableAggregation.MEAN)
    layout = strategy.layout
    rows = layout.wrap(
        layout.place(np.asarray(values, dtype)), tuple(range(num_active))
    )
    strategy.run(lambda x: variable.set_value(x), args=(rows,))
    assert variable[...].dtype == dtype
    assert int(variable[...]) == sum(values[:num_active]) // num_active


def test_a_flag_of_a_metric_must_be_equal_on_all_replicas(strategy):
    class Count(nnx.Module):
        def __init__(self):
            self.value = nnx.metrics.MetricState(jnp.asarray(5, jnp.int32))
            self.is_used = nnx.metrics.MetricState(jnp.asarray(False))

    count = Count()

    def step_fn():
        add(count.value, 2)
        count.is_used[...] = jnp.asarray(True)

    strategy.run(step_fn)
    assert count.value[...].dtype == jnp.int32
    assert int(count.value[...]) == 5 + 4 * 2 and bool(count.is_used[...])


def test_a_replica_reads_its_share_of_a_sum(strategy, ids):
    seen = nnx.Variable(jnp.asarray(2.0), aggregation=VariableAggregation.SUM)

    def step_fn(x):
        before = seen[...]
        add(seen, x)
        total = get_replica_context().all_reduce("sum", seen[...])
        return before, seen[...], total

    before, after, total = strategy.run(step_fn, args=(ids,))
    assert before.stacked.tolist() == [2, 0, 0, 0]
    assert after.stacked.tolist() == [3, 2, 3, 4]
    assert total.stacked.tolist() == [12, 12, 12, 12]
    assert float(strategy.reduce("sum", after)) == float(seen[...]) == 12


def test_a_running_mean_is_not_summed_silently(strategy, ids):
    metric = nnx.metrics.Welford()
    with pytest.raises(ReplicaMismatchError, match=r"metric/mean \(plain, mirrored\)"):
        strategy.run(lambda x: metric.update(values=jnp.atleast_1d(x)), args=(ids,))
