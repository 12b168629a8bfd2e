import jax
import jax.numpy as jnp
import numpy as np
import pytest

from armillary import ReduceOp
from armillary.distribute import PerReplica, is_per_replica


def test_a_value_lists_those_of_its_replicas():
    value = PerReplica(jnp.arange(6.0).reshape(3, 2), 3)
    assert [row.tolist() for row in value.values] == [[0, 1], [2, 3], [4, 5]]
    assert value.active is value.stacked
    assert repr(value) == "PerReplica(3 x float32[2])"


def test_rows_without_data_are_left_out():
    value = PerReplica(jnp.arange(6.0).reshape(3, 2), 2)
    assert len(value.values) == 2
    assert value.active.shape == (2, 2)
    assert repr(value) == "PerReplica(2 x float32[2])"


def test_a_value_is_a_pytree():
    value = PerReplica(jnp.arange(3.0), 2, is_shared=True)
    doubled = jax.tree.map(lambda leaf: leaf * 2, value)
    assert isinstance(doubled, PerReplica) and doubled.num_active == 2
    assert doubled.is_shared and not PerReplica(jnp.arange(3.0), 2).is_shared
    np.testing.assert_array_equal(doubled.stacked, [0, 2, 4])
    assert is_per_replica(value) and not is_per_replica(value.stacked)
    assert repr(jax.tree.map(lambda _: None, value)) == "PerReplica(2 x ?)"


@pytest.mark.parametrize("name", ["shape", "dtype", "ndim", "sum", "mean"])
def test_an_attribute_of_arrays_leads_to_reduce(name):
    value = PerReplica(jnp.ones((4, 2)), 4)
    with pytest.raises(AttributeError) as caught:
        getattr(value, name)
    assert str(caught.value) == (
        f"`{name}` was asked of a PerReplica, which holds one value for each of 4 "
        "replicas. Use it inside the function given to `strategy.run`, or reduce it "
        "first: `strategy.reduce(ReduceOp.SUM, value)`."
    )


def test_another_attribute_is_missing():
    with pytest.raises(AttributeError, match="PerReplica has no attribute 'foo'"):
        PerReplica(jnp.ones(1), 1).foo  # noqa: B018


@pytest.mark.parametrize("value", [ReduceOp.SUM, "SUM", "sum", "Sum"])
def test_an_operation_may_be_named(value):
    assert ReduceOp.of(value) is ReduceOp.SUM


@pytest.mark.parametrize("value", ["max", None, 1, ""])
def test_an_unknown_operation_is_an_error(value):
    with pytest.raises(ValueError) as caught:
        ReduceOp.of(value)
    assert str(caught.value) == (
        f"`reduce_op` is {value!r}, but it must be `ReduceOp.SUM` or `ReduceOp.MEAN`. "
        "Use one of these, or their names as strings."
    )


def test_using_a_per_replica_value_as_an_array_names_the_ways_out():
    with pytest.raises(TypeError, match=r"strategy.run\(fn, args=\(value,\)\)"):
        jnp.sin(PerReplica(jnp.ones((2, 3)), 2))  # pyright: ignore
