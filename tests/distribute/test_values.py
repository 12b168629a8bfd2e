"""Tests of per-replica values: how to read them, and the errors of misuse."""

import copy
import inspect
import operator
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import armillary
from armillary.distribute import PerReplica, ReduceOp, is_per_replica


def test_a_value_lists_the_values_of_its_replicas():
    value = PerReplica(jnp.arange(6.0).reshape(3, 2), (0, 1, 2))
    assert [row.tolist() for row in value.values] == [[0, 1], [2, 3], [4, 5]]
    assert value.active is value.stacked
    assert repr(value) == "PerReplica(3 x float32[2])"


def test_a_value_is_a_pytree():
    value = PerReplica(jnp.arange(3.0), (0, 1))
    doubled = jax.tree.map(lambda leaf: leaf * 2, value)
    assert isinstance(doubled, PerReplica) and doubled.num_active == 2
    assert not doubled.is_shared
    np.testing.assert_array_equal(doubled.stacked, [0, 2, 4])
    assert is_per_replica(value) and not is_per_replica(value.stacked)
    assert repr(jax.tree.map(lambda _: None, value)) == "PerReplica(2 x ?)"


def test_a_shared_value_is_held_once():
    value = PerReplica(jnp.arange(2.0), (0, 1), shared_by=3)
    doubled = jax.tree.map(lambda leaf: leaf * 2, value)
    assert doubled.is_shared and repr(doubled) == "PerReplica(2 x float32[2])"
    np.testing.assert_array_equal(doubled.stacked, [[0, 2]] * 3)
    np.testing.assert_array_equal(doubled.active, [[0, 2]] * 2)
    assert [part.tolist() for part in doubled.values] == [[0, 2]] * 2


@pytest.mark.parametrize("use", [jnp.sin, np.asarray, np.mean, bool])
def test_use_as_one_array_leads_to_run_and_reduce(use):
    value = PerReplica(jnp.ones((4, 2)), (0, 1, 2, 3))
    with pytest.raises(TypeError, match=r"used as one array.*strategy\.run\(step_fn"):
        use(value)


OPERATIONS = {
    "v + v": lambda v: v + v,
    "v + 1": lambda v: v + 1,
    "2 * v": lambda v: 2 * v,
    "sum": lambda v: sum([v, v]),
    "v / 4": lambda v: v / 4,
    "1 - v": lambda v: 1 - v,
    "v ** 2": lambda v: v**2,
    "v % 2": lambda v: v % 2,
    "divmod": lambda v: divmod(v, 2),
    "v @ v": lambda v: v @ v,
    "-v": lambda v: -v,
    "abs": abs,
    "v & v": lambda v: v & v,
    "v << 1": lambda v: v << 1,
    "v += 1": lambda v: operator.iadd(0.0, v),
    "v > 0": lambda v: v > 0,
    "v <= 0": lambda v: v <= 0,
    "v == 0": lambda v: v == 0,
    "v != 0": lambda v: v != 0,
    "in a list": lambda v: v in [0.0],
    "max": lambda v: max(v, 0),
    "float": float,
    "int": int,
    "complex": complex,
    "round": round,
    "format": lambda v: f"{v:.3f}",
    "percent": lambda v: "%f" % v,  # noqa: UP031
    "v[0]": lambda v: v[0],
    "len": len,
    "list": list,
    "unpacking": lambda v: [*v],
    "a loop": lambda v: [part for part in v],  # noqa: C416
    "of NumPy": lambda v: np.ones(2) + v,
    "number of NumPy": lambda v: np.float32(1) + v,
    "function of NumPy": np.exp,
    "of JAX": lambda v: jnp.ones(2) + v,
    "comparison of JAX": lambda v: jnp.ones(2) > v,
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_arithmetic_outside_run_has_the_line_to_write(name):
    value = PerReplica(jnp.ones(4), (0, 1, 2, 3))
    with pytest.raises(TypeError) as caught:
        OPERATIONS[name](value)
    for line in (
        "PerReplica(4 x float32[])",
        '`strategy.reduce("mean", value)`',
        "`strategy.local_results(value)`",
    ):
        assert line in str(caught.value)


@pytest.mark.parametrize("name", ["numpy", "item", "mean", "shape", "dtype", "astype"])
def test_attributes_of_an_array_say_what_to_write(name):
    value = PerReplica(jnp.ones(4), (0, 1, 2, 3))
    with pytest.raises(AttributeError, match=rf"'{name}'\. .*`strategy\.reduce\("):
        getattr(value, name)
    assert not hasattr(value, name) and getattr(value, name, None) is None


def test_a_value_stays_a_plain_object():
    value = PerReplica(jnp.ones(4), (0, 1, 2, 3))
    assert value == value and len({value, value}) == 1
    assert f"{value}" == str(value) == repr(value)
    with pytest.raises(AttributeError, match=r"has no attribute 'vales'$"):
        _ = value.vales
    again = copy.deepcopy(value)
    assert again is not value and again.num_active == 4
    pickled = pickle.loads(pickle.dumps(value))
    np.testing.assert_array_equal(pickled.stacked, value.stacked)
    assert inspect.getmembers(value)


@pytest.mark.parametrize("value", ["median", None, 1, ""])
def test_an_unknown_operation_is_an_error(value):
    with pytest.raises(ValueError) as caught:
        ReduceOp.of(value)
    assert str(caught.value).startswith(
        f'`reduce_op` is {value!r}, but it must be "sum", "mean", "max" or "min", or '
    )


KINDS = [armillary.MirroredStrategy, armillary.distribute.CentralStorageStrategy]
DEVICES = {"half": slice(2), "others": slice(4, 8), "two others": slice(5, 7)}


def number_replicas(strategy):
    return strategy.distribute_values_from_function(
        lambda context: jnp.full(2, context.replica_id_in_sync_group + 1.0)
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("devices", DEVICES)
def test_values_reduced_by_another_strategy_go_into_run(kind, devices):
    strategy = armillary.MirroredStrategy(jax.devices()[:4])
    other = kind(jax.devices()[DEVICES[devices]])
    mean = other.reduce("MEAN", number_replicas(other))

    def step(held, number):
        return held["mean"] * number

    compiled = armillary.function(lambda *args: strategy.run(step, args=args))
    for call in (compiled, lambda *args: strategy.run(step, args=args)):
        found = strategy.gather(call({"mean": mean}, jnp.asarray(2.0)), axis=0)
        expected = np.full(8, other.num_replicas_in_sync + 1.0)
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("kind", KINDS)
def test_values_of_more_or_fewer_replicas_are_an_error(kind):
    two, four = kind(jax.devices()[:2]), kind(jax.devices()[:4])
    for strategy, other in ((two, four), (four, two)):
        value = number_replicas(other)
        with pytest.raises(ValueError) as caught:
            strategy.run(jnp.negative, args=(value,))
        message = str(caught.value)
        assert f"hold {value!r}, which comes from a different strategy" in message
        assert f"{strategy!r}: the numbers" in message and "`gather`" in message


def test_one_device_takes_what_several_made():
    four = armillary.MirroredStrategy(jax.devices()[:4])
    mean = four.reduce("MEAN", number_replicas(four))
    strategy, total = armillary.OneDeviceStrategy("cpu:5"), nnx.Param(jnp.zeros(2))

    @armillary.function(strategy=strategy)
    def step(value):
        total[...] += value
        return strategy.run(lambda: total[...] * 2)

    assert [step(mean).tolist() for _ in range(2)] == [[5, 5], [10, 10]]


def test_another_name_of_an_operation_is_answered_with_ours():
    strategy = armillary.MirroredStrategy(jax.devices()[:2])
    value = number_replicas(strategy)
    with pytest.raises(ValueError, match=r'`strategy\.reduce\("mean", values\)`'):
        strategy.reduce("AVG", value)
    with pytest.raises(ValueError, match=r'`armillary\.all_reduce\("sum", values\)`'):
        strategy.run(lambda x: armillary.all_reduce("total", x), args=(value,))
