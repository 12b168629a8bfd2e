"""Tests of the rules that hold under every strategy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import armillary
from armillary import MirroredStrategy, get_replica_context, get_strategy
from armillary.data import InputContext
from armillary.distribute import (
    DefaultStrategy,
    PerReplica,
    ReduceOp,
    has_strategy,
    in_cross_replica_context,
)
from armillary.errors import ReplicaContextError
from tests.distribute.contract import strategy as strategy
from tests.problems import Notes


@pytest.fixture
def ids(strategy):
    """The number of each replica, as a per-replica value of shape (2,)."""

    def value_fn(context):
        return jnp.full((2,), context.replica_id_in_sync_group, jnp.float32)

    return strategy.distribute_values_from_function(value_fn)


def test_replicas_are_counted(strategy):
    if isinstance(strategy, MirroredStrategy):
        assert strategy.num_replicas_in_sync == strategy.mesh.size
    else:
        assert strategy.num_replicas_in_sync == 1
    assert str(strategy.num_replicas_in_sync) in repr(strategy) or (
        strategy.mesh is None
    )


def test_run_returns_nests_with_static_leaves(strategy, ids):
    def fn(x):
        return {"a": (x, None), "name": "text", "n": 3, "b": [x + 1]}

    result = strategy.run(fn, args=(ids,))
    assert result["name"] == "text" and result["n"] == 3 and result["a"][1] is None
    first = strategy.local_results(result)[0]
    np.testing.assert_array_equal(first["a"][0], [0, 0])
    np.testing.assert_array_equal(first["b"][0], [1, 1])
    assert first["name"] == "text" and first["a"][1] is None
    reduced = strategy.reduce("mean", {"a": result["a"], "b": result["b"]})
    mean = (strategy.num_replicas_in_sync - 1) / 2
    np.testing.assert_allclose(reduced["a"][0], [mean, mean])
    np.testing.assert_allclose(reduced["b"][0], [mean + 1, mean + 1])


def test_state_in_the_arguments_is_updated(strategy, ids):
    model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
    kernel = model.kernel

    def fn(model, x):
        model.kernel[...] = model.kernel[...] + 1
        return model(x[None])

    before = np.asarray(kernel[...])
    strategy.run(fn, args=(model, ids))
    assert model.kernel is kernel
    np.testing.assert_array_equal(kernel[...], before + 1)


@pytest.mark.parametrize("axis", [None, 0, -1])
@pytest.mark.parametrize("op", [ReduceOp.SUM, ReduceOp.MEAN])
def test_reduce(strategy, op, axis):
    n = strategy.num_replicas_in_sync
    rows = np.arange(n * 6, dtype=np.float32).reshape(n, 2, 3)
    value = strategy.distribute_values_from_function(
        lambda context: rows[context.replica_id_in_sync_group]
    )
    axes = {None: (0,), 0: (0, 1), 1: (0, 2), -1: (0, 2)}[axis]
    expected = (np.sum if op is ReduceOp.SUM else np.mean)(rows, axes)
    np.testing.assert_allclose(strategy.reduce(op, value, axis), expected, rtol=1e-6)
    by_name = strategy.reduce(op.name.lower(), value, axis=axis)
    np.testing.assert_allclose(by_name, expected, rtol=1e-6)


@pytest.mark.parametrize("axis", [0, -1])
def test_gather(strategy, axis):
    n = strategy.num_replicas_in_sync
    rows = np.arange(n * 6, dtype=np.float32).reshape(n, 2, 3)
    value = strategy.distribute_values_from_function(
        lambda context: rows[context.replica_id_in_sync_group]
    )
    joined = strategy.gather({"x": value, "tag": "text"}, axis=axis)
    np.testing.assert_array_equal(joined["x"], np.concatenate(rows, axis))
    assert joined["tag"] == "text"


def test_reduce_and_gather_leave_other_values(strategy):
    assert strategy.reduce(ReduceOp.MEAN, 3.0) == 3.0
    np.testing.assert_allclose(strategy.reduce("mean", jnp.ones((2, 3)), 0), [1, 1, 1])
    assert strategy.gather(3.0, axis=0) == 3.0
    assert strategy.local_results("text") == ("text",)


def test_the_scope_is_cross_replica_context(strategy):
    assert not in_cross_replica_context() and get_replica_context() is not None
    with strategy.scope() as entered, strategy.scope():
        assert entered is strategy and get_strategy() is strategy
        is_default = strategy is DefaultStrategy()
        assert in_cross_replica_context() != is_default
        assert (get_replica_context() is None) != is_default
        assert has_strategy() != is_default
    assert get_strategy() is DefaultStrategy() and not has_strategy()


def test_strategies_are_not_mixed(strategy, ids):
    other = MirroredStrategy(jax.devices()[:3])
    calls = {
        "run": lambda: strategy.run(lambda: None),
        "reduce": lambda: strategy.reduce("mean", ids),
        "gather": lambda: strategy.gather(ids, axis=0),
        "scope": lambda: strategy.scope().__enter__(),
    }
    for name, call in calls.items():
        with other.scope(), pytest.raises(ReplicaContextError) as caught:
            call()
        assert str(caught.value) == (
            f"`strategy.{name}` of {strategy!r} was called inside the scope of "
            "MirroredStrategy(3 x cpu). Leave the other scope first, or use its "
            "strategy (`armillary.get_strategy()`)."
        )
    assert get_strategy() is DefaultStrategy()


def test_one_replica_returns_arrays_and_several_return_parts(strategy, ids):
    result = strategy.run(lambda x: {"x": x + 1, "n": 3}, args=(ids,))
    is_one = strategy.num_replicas_in_sync == 1
    assert isinstance(result["x"], jax.Array if is_one else PerReplica)
    assert isinstance(strategy.reduce("sum", result["x"]), jax.Array)
    assert isinstance(strategy.gather(result["x"], axis=0), jax.Array)
    for part in strategy.local_results(result):
        assert isinstance(part["x"], jax.Array) and part["n"] == 3
    again = strategy.run(
        lambda x: get_replica_context().all_reduce("mean", x), args=(result["x"],)
    )
    mean = 1 + (strategy.num_replicas_in_sync - 1) / 2
    np.testing.assert_array_equal(strategy.reduce("mean", again), [mean, mean])


def test_each_part_lies_on_the_device_of_its_replica(strategy, ids):
    mesh = strategy.mesh
    is_one = strategy.num_replicas_in_sync == 1
    homes = (
        [set(strategy.layout.devices)] if is_one else [{d} for d in mesh.devices.flat]
    )
    batch = strategy.distribute_values_from_function(lambda _: jnp.ones(3))
    keys = strategy.run(lambda x: (x * 2, jax.random.key(0)), args=(batch,))
    for value in (ids, batch, *keys):
        parts = strategy.local_results(value)
        assert [part.devices() for part in parts] == homes


def test_run_is_replica_context(strategy):
    seen = Notes()

    def fn():
        context = get_replica_context()
        seen.append((get_strategy(), in_cross_replica_context(), context))
        return context.replica_id_in_sync_group + jnp.zeros((), jnp.int32)

    result = strategy.run(fn)
    found, is_cross, context = next(iter(seen))
    assert found is strategy and not is_cross and context.strategy is strategy
    assert context.num_replicas_in_sync == strategy.num_replicas_in_sync
    ids = [int(row) for row in strategy.local_results(result)]
    assert ids == list(range(strategy.num_replicas_in_sync))
    assert get_strategy() is DefaultStrategy()


@pytest.mark.parametrize("axis", [0, -1])
def test_all_gather(strategy, ids, axis):
    result = strategy.run(
        lambda x: get_replica_context().all_gather(x[None] + jnp.ones((3, 1)), axis),
        args=(ids,),
    )
    rows = [np.full((3, 2), i + 1) for i in range(strategy.num_replicas_in_sync)]
    for row in strategy.local_results(result):
        np.testing.assert_array_equal(row, np.concatenate(rows, axis))


def test_set_strategy_lasts_until_it_is_undone(strategy):
    armillary.distribute.set_strategy(strategy)
    try:
        is_default = strategy is DefaultStrategy()
        assert get_strategy() is strategy
        assert in_cross_replica_context() != is_default
        with strategy.scope():
            assert get_strategy() is strategy
    finally:
        armillary.distribute.set_strategy(None)
    assert get_strategy() is DefaultStrategy() and not in_cross_replica_context()


class CountedLinear(nnx.Module):
    def __init__(self):
        self.linear = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
        self.calls = armillary.create_global_step()

    def __call__(self, x):
        self.calls[...] = self.calls[...] + 1
        return self.linear(x)[:, 0]


@pytest.mark.slow
def test_a_stateful_function_inside_a_gradient(strategy):
    model = CountedLinear()

    @armillary.function
    def loss(model, x):
        return armillary.compute_average_loss(model(x))

    def step_fn(x):
        return armillary.all_reduce(
            "sum", nnx.grad(lambda model: loss(model, x))(model)
        )["linear"]["kernel"][...]

    def value_fn(context):
        return jnp.full((3, 2), context.replica_id_in_sync_group + 1, jnp.float32)

    n = strategy.num_replicas_in_sync
    batch = strategy.distribute_values_from_function(value_fn)
    gradients = strategy.local_results(strategy.run(step_fn, args=(batch,)))
    for gradient in gradients:
        np.testing.assert_allclose(gradient, [[(n + 1) / 2]] * 2)
    assert int(model.calls[...]) == 1


def test_a_global_batch_is_split(strategy):
    n = strategy.num_replicas_in_sync
    arrays = {"x": np.arange(16 * 2, dtype=np.float32).reshape(16, 2)}
    dataset = strategy.distribute_dataset(
        armillary.data.from_arrays(arrays, batch_size=8)
    )
    batches = list(dataset)
    assert len(batches) == 2
    rows = strategy.local_results(batches[1])
    assert len(rows) == n
    np.testing.assert_array_equal(
        np.concatenate([row["x"] for row in rows]), arrays["x"][8:]
    )
    sums = strategy.run(lambda batch: jnp.sum(batch["x"]), args=(batches[0],))
    assert float(strategy.reduce("sum", sums)) == arrays["x"][:8].sum()


def test_a_dataset_from_a_function_gives_each_replica_a_batch(strategy):
    n = strategy.num_replicas_in_sync
    seen: list[InputContext] = []

    def dataset_fn(context):
        seen.append(context)
        size = context.get_per_replica_batch_size(8)
        return armillary.data.from_arrays(np.arange(8), batch_size=size)

    (batch,) = strategy.distribute_datasets_from_function(dataset_fn)
    assert seen[0].num_replicas_in_sync == n
    rows = [np.asarray(row) for row in strategy.local_results(batch)]
    assert [len(row) for row in rows] == [8 // n] * n
    np.testing.assert_array_equal(np.concatenate(rows), np.arange(8))


def test_a_step_compiled_by_function_gives_the_same(strategy, ids):
    metric = nnx.metrics.Average()

    @armillary.function
    def step(x):
        return strategy.run(lambda x: metric.update(values=x), args=(x,))

    step(ids)
    step(ids)
    n = strategy.num_replicas_in_sync
    assert float(metric.count[...]) == 2 * 2 * n
    assert float(metric.compute()) == pytest.approx((n - 1) / 2)


@pytest.mark.slow
def test_a_function_with_state_is_part_of_the_run_that_calls_it(strategy):
    count = armillary.create_global_step()
    linear = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
    rngs = nnx.Rngs(params=jax.random.key(0))

    @armillary.function
    def increment():
        count[...] += 1
        return count[...]

    @armillary.function
    def apply(model, x):
        return model(x)

    @armillary.function
    def draw(rngs):
        return jax.random.normal(rngs.params(), (2,))

    def step_fn():
        return increment(), apply(linear, jnp.ones((1, 2))), draw(rngs)

    number, output, drawn = strategy.local_results(strategy.run(step_fn))[0]
    assert int(number) == int(count[...]) == 1
    np.testing.assert_allclose(output, linear(jnp.ones((1, 2))), rtol=1e-6)
    # The first replica draws as one device does.
    expected = jax.random.normal(nnx.Rngs(params=jax.random.key(0)).params(), (2,))
    np.testing.assert_array_equal(drawn, expected)
    assert int(rngs.params.count[...]) == 1


def test_merge_call_gets_the_objects_themselves(strategy):
    model = nnx.Linear(1, 1, rngs=nnx.Rngs(0))

    def merge_fn(merged_strategy, given, kernel, values):
        assert given["model"] is model and kernel is model.kernel
        kernel.set_value(merged_strategy.reduce("mean", values)["w"][...])

    def fn():
        values = nnx.State({"w": nnx.Param(jnp.full((1, 1), 5.0))})
        get_replica_context().merge_call(
            merge_fn, args=({"model": model}, model.kernel, values)
        )

    strategy.run(fn)
    assert float(model.kernel[...][0, 0]) == 5


def test_merge_call_sees_the_values_of_all_replicas(strategy, ids):
    def merge_fn(merged_strategy, x, label, *, y):
        assert merged_strategy is strategy and label == "label"
        assert in_cross_replica_context() and get_strategy() is strategy
        assert merged_strategy.num_replicas_in_sync == strategy.num_replicas_in_sync
        total = merged_strategy.reduce(ReduceOp.SUM, x)
        mean = merged_strategy.reduce("mean", x, axis=0)
        return total, mean, merged_strategy.gather(y, axis=0), y

    def fn(x):
        total, mean, joined, own = get_replica_context().merge_call(
            merge_fn, args=(x, "label"), kwargs={"y": x}
        )
        assert not in_cross_replica_context()
        return own + total, mean, joined

    n = strategy.num_replicas_in_sync
    results = strategy.local_results(strategy.run(fn, args=(ids,)))
    for replica, (value, mean, joined) in enumerate(results):
        np.testing.assert_array_equal(value, [replica + sum(range(n))] * 2)
        assert float(mean) == (n - 1) / 2
        np.testing.assert_array_equal(joined, np.repeat(np.arange(n), 2))


def test_run_inside_merge_call(strategy, ids):
    aggregation = armillary.VariableAggregation.SUM
    count = nnx.Variable(jnp.zeros(()), aggregation=aggregation)

    def inner(x, shared, *, scale):
        assert not in_cross_replica_context()
        assert get_replica_context().strategy is strategy
        count[...] = count[...] + 1
        return {"x": x * scale + shared, "tag": "text"}

    def merge_fn(merged_strategy, x):
        with merged_strategy.scope():
            result = merged_strategy.run(inner, (x, jnp.ones(2)), {"scale": 10.0})
        again = merged_strategy.run(inner, (result["x"], 0.0), {"scale": 1.0})
        assert again["tag"] == "text"
        return merged_strategy.reduce("sum", again["x"]), again

    def fn(x):
        total, again = get_replica_context().merge_call(merge_fn, args=(x,))
        return total, again["x"]

    n = strategy.num_replicas_in_sync
    results = strategy.local_results(strategy.run(fn, args=(ids,)))
    for replica, (total, own) in enumerate(results):
        np.testing.assert_array_equal(own, [replica * 10 + 1] * 2)
        np.testing.assert_array_equal(total, [10 * sum(range(n)) + n] * 2)
    assert float(count[...]) == 2 * n


def test_an_error_in_merge_call_reaches_the_caller(strategy):
    def merge_fn(merged_strategy):
        raise RuntimeError("of the user")

    def fn():
        get_replica_context().merge_call(merge_fn)

    with pytest.raises(RuntimeError, match="of the user"):
        strategy.run(fn)
    assert get_strategy() is armillary.distribute.DefaultStrategy()
    with pytest.raises(TypeError, match="`merge_fn` is 3"):
        strategy.run(lambda: get_replica_context().merge_call(3))


def test_merge_call_outside_of_run_uses_the_default_strategy():
    seen = []

    def merge_fn(strategy, x):
        assert in_cross_replica_context()
        seen.append(strategy)
        return strategy.reduce("mean", x) + 1

    assert get_replica_context().merge_call(merge_fn, args=(1.0,)) == 2
    assert seen == [armillary.distribute.DefaultStrategy()]


def test_extended_updates_in_merge_call(strategy, ids):
    weight = nnx.Variable(jnp.ones(2))
    bias = nnx.Variable(jnp.ones(()))

    def subtract(variable, amount, *, scale):
        assert not in_cross_replica_context()
        variable[...] = variable[...] - scale * amount

    def apply(merged_strategy, x):
        extended = merged_strategy.extended
        whole = extended.reduce_to("mean", x, weight)
        extended.update(weight, subtract, args=(whole,), kwargs={"scale": 2.0})
        pairs = [(x, weight), (x, bias)]
        first, second = extended.batch_reduce_to("sum", pairs)
        extended.update(
            bias, subtract, args=(first[0] + second[1],), kwargs={"scale": 1}
        )

    def fn(x):
        get_replica_context().merge_call(apply, args=(x,))

    strategy.extended.call_for_each_replica(fn, args=(ids,))
    n = strategy.num_replicas_in_sync
    np.testing.assert_allclose(weight[...], [1 - (n - 1)] * 2)
    assert float(bias[...]) == 1 - 2 * sum(range(n))


def test_extended_updates_outside_of_run(strategy):
    weight = nnx.Variable(jnp.ones(2))

    def assign(variable, value):
        variable[...] = value
        return "done"

    with strategy.scope():
        result = strategy.extended.update(weight, assign, args=(jnp.zeros(2),))
    assert result == "done" and not weight[...].any()
    with pytest.raises(ReplicaContextError, match=r"`strategy.extended.update` was"):
        strategy.run(lambda: strategy.extended.update(weight, assign))
    with pytest.raises(TypeError, match="`fn` is 3"):
        strategy.extended.update(weight, 3)
