import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import armillary
from armillary.distribute import PerReplica, ReduceOp, is_per_replica


def test_a_value_lists_those_of_its_replicas():
    value = PerReplica(jnp.arange(6.0).reshape(3, 2), 3)
    assert [row.tolist() for row in value.values] == [[0, 1], [2, 3], [4, 5]]
    assert value.active is value.stacked
    assert repr(value) == "PerReplica(3 x float32[2])"


def test_a_value_is_a_pytree():
    value = PerReplica(jnp.arange(3.0), 2)
    doubled = jax.tree.map(lambda leaf: leaf * 2, value)
    assert isinstance(doubled, PerReplica) and doubled.num_active == 2
    assert not doubled.is_shared
    np.testing.assert_array_equal(doubled.stacked, [0, 2, 4])
    assert is_per_replica(value) and not is_per_replica(value.stacked)
    assert repr(jax.tree.map(lambda _: None, value)) == "PerReplica(2 x ?)"


def test_a_shared_value_is_held_once():
    value = PerReplica(jnp.arange(2.0), 2, shared_by=3)
    doubled = jax.tree.map(lambda leaf: leaf * 2, value)
    assert doubled.is_shared and repr(doubled) == "PerReplica(2 x float32[2])"
    np.testing.assert_array_equal(doubled.stacked, [[0, 2]] * 3)
    np.testing.assert_array_equal(doubled.active, [[0, 2]] * 2)
    assert [part.tolist() for part in doubled.values] == [[0, 2]] * 2


@pytest.mark.parametrize("use", [jnp.sin, np.asarray, np.mean, bool])
def test_use_as_one_array_leads_to_run_and_reduce(use):
    value = PerReplica(jnp.ones((4, 2)), 4)
    with pytest.raises(TypeError, match=r"used as one array.*strategy\.run\(step_fn"):
        use(value)


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
def test_what_another_strategy_reduced_goes_into_run(kind, devices):
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
        assert f"hold {value!r}, a value for each replica of another" in message
        assert f"{strategy!r}. Combine" in message and "`gather`" in message


def test_one_device_takes_what_several_made():
    four = armillary.MirroredStrategy(jax.devices()[:4])
    mean = four.reduce("MEAN", number_replicas(four))
    strategy, total = armillary.OneDeviceStrategy("cpu:5"), nnx.Param(jnp.zeros(2))

    @armillary.function(strategy=strategy)
    def step(value):
        total[...] += value
        return strategy.run(lambda: total[...] * 2)

    assert [step(mean).tolist() for _ in range(2)] == [[5, 5], [10, 10]]
