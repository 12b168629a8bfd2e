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


USES = {
    "was asked for `shape`": lambda value: value.shape,
    "was asked for `max`": lambda value: value.max(),
    "was asked for `reshape`": lambda value: value.reshape(-1),
    "was indexed": lambda value: value[0],
    "was iterated over": sum,
    "was asked for its length": len,
    "was converted to a number": float,
    "was used as a condition": lambda value: 1 if value else 0,
    "was used as one array": np.asarray,
    "was used in `multiply`": lambda value: 2 * value,
    "was used in `add`": lambda value: np.ones(2) + value,
    "was used in `matmul`": lambda value: value @ value,
    "was used in `negative`": lambda value: -value,
    "was used in `greater`": lambda value: value > 1,
}


@pytest.mark.parametrize("use", USES)
def test_use_as_an_array_leads_to_run_and_reduce(use):
    value = PerReplica(jnp.ones((4, 2)), 4)
    with pytest.raises((TypeError, AttributeError)) as caught:
        USES[use](value)
    assert str(caught.value) == (
        f"PerReplica(4 x float32[2]) {use}, but it holds one part for each of 4 "
        "replicas. Put the code into a function, and call that with "
        "`strategy.run(step_fn, args=(batch,))`, or combine the parts first: "
        "`strategy.reduce(ReduceOp.SUM, value)`, `strategy.gather(value, axis=0)`."
    )


@pytest.mark.parametrize("use", [jnp.sin, lambda value: jnp.ones(2) * value])
def test_use_in_jax_leads_to_run_and_reduce(use):
    value = PerReplica(jnp.ones((4, 2)), 4)
    with pytest.raises(TypeError, match=r"used as one array.*strategy\.run\(step_fn"):
        use(value)


def test_a_value_is_equal_to_itself_alone():
    value, other = (PerReplica(jnp.ones((4, 2)), 4) for _ in range(2))
    assert {value, value, other} == {other, value}
    assert value != other


def test_another_attribute_is_missing():
    with pytest.raises(AttributeError, match="PerReplica has no attribute 'foo'"):
        PerReplica(jnp.ones(1), 1).foo  # noqa: B018


@pytest.mark.parametrize("value", [ReduceOp.SUM, "SUM", "sum", "Sum"])
def test_an_operation_may_be_named(value):
    assert ReduceOp.of(value) is ReduceOp.SUM


@pytest.mark.parametrize("value", ["median", None, 1, ""])
def test_an_unknown_operation_is_an_error(value):
    with pytest.raises(ValueError) as caught:
        ReduceOp.of(value)
    assert str(caught.value).startswith(
        f'`reduce_op` is {value!r}, but it must be "sum", "mean", "max" or "min", or '
    )
