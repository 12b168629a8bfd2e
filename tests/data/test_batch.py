import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from armillary.data._batch import check_batch, get_signature
from armillary.errors import BatchSizeError


def test_numpy_and_jax_leaves_become_numpy():
    batch = {"x": jnp.arange(3.0), "y": (np.zeros((3, 2), ml_dtypes.bfloat16),)}
    arrays, num_rows = check_batch(batch, lambda: "A batch")
    assert num_rows == 3
    assert all(type(leaf) is np.ndarray for leaf in jax.tree.leaves(arrays))
    assert arrays["y"][0].dtype == ml_dtypes.bfloat16


@pytest.mark.parametrize("batch", [{}, None, ()])
def test_batch_without_leaves_is_an_error(batch):
    with pytest.raises(TypeError, match=r"A batch is .*, which holds no array"):
        check_batch(batch, lambda: "A batch")


def test_leaves_that_are_not_arrays_are_all_named():
    batch = {
        "x": np.zeros(3),
        "count": 3,
        "names": np.array(["a", "b", "c"]),
        "nested": [np.array([None])],
        "key": jax.random.split(jax.random.key(0), 3),
    }
    with pytest.raises(TypeError) as caught:
        check_batch(batch, lambda: "Batch 2")
    message = str(caught.value)
    assert message.startswith("Batch 2 has leaves that are not arrays of numbers")
    assert "\n  count: int 3\n" in message
    assert "\n  names: ndarray of dtype <U1\n" in message
    assert "\n  nested/0: ndarray of dtype object\n" in message
    assert "\n  key: " in message
    assert "  x:" not in message
    assert "np.asarray(values)" in message


@pytest.mark.parametrize("scalar", [np.float32(1), np.array(1), jnp.array(1)])
def test_leaves_without_an_axis_are_named(scalar):
    message = "A batch has leaves without a batch axis: weight/0."
    with pytest.raises(BatchSizeError, match=re.escape(message)):
        check_batch({"x": np.zeros(3), "weight": [scalar]}, lambda: "A batch")


def test_unequal_leading_sizes_are_listed():
    with pytest.raises(BatchSizeError) as caught:
        check_batch({"x": np.zeros((3, 2)), "y": np.zeros(4)}, lambda: "A batch")
    assert "different leading sizes" in str(caught.value)
    assert "\n  x: 3 examples, shape (3, 2)\n" in str(caught.value)
    assert "\n  y: 4 examples, shape (4,)\n" in str(caught.value)


def test_a_bare_array_is_named_root():
    with pytest.raises(TypeError, match=re.escape("(root): ndarray of dtype <U1")):
        check_batch(np.array(["a"]), lambda: "A batch")


def test_signature_uses_device_dtypes():
    narrow = {"x": np.zeros(3, np.int32)}
    wide = {"x": np.zeros(3, np.int64)}
    assert get_signature(narrow) == get_signature(wide)
    assert get_signature(narrow) != get_signature({"x": np.zeros(3, np.float32)})
    assert get_signature(narrow) != get_signature({"x": np.zeros(4, np.int32)})
    assert get_signature(narrow) != get_signature({"y": np.zeros(3, np.int32)})
