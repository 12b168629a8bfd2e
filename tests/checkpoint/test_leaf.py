"""Tests of single arrays: how they are described, stored and put back."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from armillary.checkpoint import Checkpoint, CheckpointManager
from armillary.checkpoint._store import (
    LeafSpec,
    as_restored,
    describe_leaves,
    stored_sharding,
)


def describe(leaf: object) -> LeafSpec:
    return describe_leaves({"leaf": leaf})["leaf"]


@pytest.mark.parametrize(
    ("leaf", "text"),
    [
        (jnp.zeros((2, 3)), "float32 (2, 3)"),
        (jnp.zeros(4, jnp.bfloat16), "bfloat16 (4,)"),
        (jnp.asarray(True), "bool ()"),
        # What a step makes of it.
        (np.zeros(2, np.float64), "float32 (2,)"),
        (7, "int32 ()"),
        (jax.random.key(0), "key<threefry2x32> ()"),
        (jax.random.split(jax.random.key(0, impl="rbg"), 3), "key<rbg> (3,)"),
    ],
)
def test_descriptions_name_dtype_and_shape(leaf: object, text: str) -> None:
    assert str(describe(leaf)) == text


def test_values_without_numbers_are_an_error_that_names_all() -> None:
    leaves = {"a": "text", "b": object(), "c": np.asarray(["a"]), "d": 1.0}
    with pytest.raises(
        TypeError,
        match=r"(?s)holds 3 values .*  a: str 'text'\n  b: object .*\n  c: ndarray",
    ):
        describe_leaves(leaves)


def test_free_arrays_stay_free_and_on_a_device_that_is_not_the_default() -> None:
    with jax.default_device(jax.devices()[3]):
        target = jnp.zeros(3)
    assert stored_sharding(target) is None

    restored = as_restored(np.ones(3, np.float32), target)

    assert restored.devices() == {jax.devices()[3]}
    assert not restored.committed


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["uint2", "int4"])
def test_narrow_integers_are_saved_and_restored(tmp_path, dtype) -> None:
    values = {"x": jnp.array([1, 0, 1], dtype), "y": np.ones((2, 2), jnp.dtype(dtype))}
    state = {"values": nnx.Variable(values)}
    manager = CheckpointManager(Checkpoint(state=state), tmp_path)
    path = manager.save(1)
    state["values"].set_value(jax.tree.map(lambda value: value - value, values))

    assert path is not None
    manager.restore(path)

    restored = state["values"].get_value()
    assert restored["x"].dtype == dtype
    assert restored["x"].tolist() == [1, 0, 1]
    assert restored["y"].tolist() == [[1, 1], [1, 1]]
