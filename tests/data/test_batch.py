"""Tests of how the batches of every library become NumPy arrays."""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from armillary.data import InputOptions, as_source, from_arrays
from armillary.data.sources._batch import check_batch
from armillary.distribute import DefaultStrategy
from armillary.errors import BatchSizeError


class Tensor:
    """An array of another library."""

    dtype = "lib.float32"

    def __init__(self, values, is_on_host=True):
        self.values, self.is_on_host = values, is_on_host

    def __array__(self, dtype=None, copy=None):
        if not self.is_on_host:
            raise TypeError("It is elsewhere.")
        return np.asarray(self.values)

    def __repr__(self):
        return "Tensor(...)"


def test_arrays_of_every_library_become_numpy():
    batch = {
        "x": jnp.arange(3.0),
        "y": (np.zeros((3, 2), ml_dtypes.bfloat16),),
        "other": Tensor([1.0, 2.0, 3.0]),
    }
    arrays, num_rows = check_batch(batch, lambda: "A batch")
    assert num_rows == 3
    assert all(type(leaf) is np.ndarray for leaf in jax.tree.leaves(arrays))
    assert arrays["y"][0].dtype == ml_dtypes.bfloat16
    assert arrays["other"].tolist() == [1, 2, 3]
    with pytest.raises(TypeError, match="It is elsewhere"):
        check_batch({"x": Tensor([1.0], is_on_host=False)}, lambda: "A batch")


@pytest.mark.parametrize("kind", [np.asarray, Tensor])
def test_buffers_that_a_generator_fills_again_are_copied(kind):
    def fill_again():
        buffer = np.zeros(2)
        for value in range(3):
            buffer[:] = value
            yield {"x": kind(buffer)}

    iterator = as_source(fill_again).make_iterator(0)
    batches = [next(iterator)["x"] for _ in range(3)]
    assert [batch.tolist() for batch in batches] == [[0, 0], [1, 1], [2, 2]]


def test_leaves_that_are_not_arrays_are_all_named():
    batch = {
        "x": np.zeros(3),
        "count": 3,
        "names": np.array(["a", "b", "c"]),
        "nested": [np.array([None])],
        "key": jax.random.split(jax.random.key(0), 3),
    } | {f"y{index:03}": "text" for index in range(100)}
    with pytest.raises(TypeError) as caught:
        check_batch(batch, lambda: "Batch 2")
    message = str(caught.value)
    assert message.startswith("Batch 2 has leaves that are not arrays of numbers")
    assert "\n  count: int 3\n" in message
    assert "\n  names: ndarray of dtype <U1\n" in message
    assert "\n  nested/0: ndarray of dtype object\n" in message
    assert "\n  key: " in message
    assert "  x:" not in message
    # If there are many leaves, the first ten are listed.
    assert "and 94 more" in message
    assert "y012" not in message
    assert "np.asarray(values)" in message


@pytest.mark.parametrize(
    ("batch", "fix"),
    [
        ({"city": np.array(["a", "b"])}, "np.unique(values, return_inverse=True)[1]"),
        ({"city": np.array(["a", "b"], object)}, "np.unique(values, return_inverse"),
        (np.zeros(2, [("x", "f4")]), "{name: rows[name] for name in rows.dtype.names}"),
        ([{"x": "1.5"}, {"x": "2"}], "np.array([float(row[name]) for row in rows])"),
    ],
)
def test_values_without_numbers_name_the_line_that_makes_some(batch, fix):
    with pytest.raises(TypeError, match=re.escape(fix)):
        check_batch(batch, lambda: "A batch")


@pytest.mark.parametrize("kind", [str, Path])
def test_the_path_of_a_file_names_the_line_that_reads_it(tmp_path, kind):
    file = tmp_path / "rows.csv"
    file.write_text("x,label\n1.5,0\n")

    with pytest.raises(TypeError, match=r"`dict\(pandas\.read_csv\(path\)\)`"):
        from_arrays(kind(file), batch_size=1)


@pytest.mark.parametrize("dtype", [">f4", ">i2", ">i8", "<f8", ">c8"])
@pytest.mark.parametrize("place_on_device", [False, True])
def test_other_orders_of_bytes_are_turned(dtype, place_on_device):
    rows = np.arange(6).astype(dtype)
    options = InputOptions(place_on_device=place_on_device)
    source = from_arrays(rows, batch_size=2)
    dataset = DefaultStrategy().distribute_dataset(source, options)
    np.testing.assert_array_equal(np.concatenate(list(dataset)), np.arange(6))
    assert dataset.element_spec.dtype.isnative


def test_extended_precision_is_named():
    with pytest.raises(TypeError, match=f"ndarray of dtype {np.dtype(np.longdouble)}"):
        check_batch(np.ones(2, np.longdouble), lambda: "A batch")


def test_a_mask_is_not_lost():
    masked = np.ma.masked_array([1.0, 2.0], mask=[False, True])
    with pytest.raises(TypeError, match=r"x: MaskedArray .*(?s:.*)values.filled\(0\)"):
        check_batch({"x": masked}, lambda: "A batch")


@pytest.mark.parametrize(
    "scalar", [np.float32(1), np.array(1), jnp.array(1), Tensor(1.0)]
)
def test_leaves_without_an_axis_are_named(scalar):
    with pytest.raises(BatchSizeError, match=r"(?s)without a batch axis.*  weight/0\n"):
        check_batch({"x": np.zeros(3), "weight": [scalar]}, lambda: "A batch")


def test_unequal_leading_sizes_are_listed():
    with pytest.raises(BatchSizeError) as caught:
        check_batch({"x": np.zeros((3, 2)), "y": np.zeros(4)}, lambda: "A batch")
    assert "different leading sizes" in str(caught.value)
    assert "\n  x: 3 examples, shape (3, 2)\n" in str(caught.value)
    assert "\n  y: 4 examples, shape (4,)\n" in str(caught.value)
