"""Tests of rows that are read by number, once for a batch."""

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from armillary.data import (
    DistributedDataset,
    FixedLenFeature,
    from_arrays,
    from_huggingface,
    from_random_access,
    from_tfrecords,
)
from armillary.data.sources._take import NO_ROW, take_rows
from armillary.distribute.strategies._layouts import MeshLayout
from tests.records import make_record, write_records

VALUES = np.arange(12, dtype=np.int32)


class Several:
    """Several processes, for a layout that asks nothing else of them."""

    is_alone = False
    index = 0
    count = 1


class Reader:
    """Reads rows that are twice their number, and keeps the requests."""

    def __init__(self):
        self.requests = []

    def __call__(self, numbers):
        self.requests.append(numbers.tolist())
        return {"x": 2 * numbers}


def take(read_rows, numbers, batches, rows_at_once=100):
    return take_rows(
        read_rows,
        np.array(numbers),
        np.array(batches),
        types={"x": jax.ShapeDtypeStruct((), np.int64)},
        rows_at_once=rows_at_once,
        argument="data",
    )


def test_a_row_is_read_once_for_a_batch():
    reader = Reader()
    rows = take(reader, [5, 3, 5, 5, 3], [0, 0, 0, 1, 1])
    assert rows["x"].tolist() == [10, 6, 10, 10, 6]
    assert reader.requests == [[5, 3, 5, 3]]


def test_a_row_that_no_step_uses_is_not_read():
    reader = Reader()
    rows = take(reader, [4, NO_ROW, 1, NO_ROW], [0, 0, 0, 0])
    assert rows["x"].tolist() == [8, 0, 2, 0]
    assert reader.requests == [[4, 1]]


def test_many_rows_are_read_in_parts():
    reader = Reader()
    rows = take(reader, range(5), [0] * 5, rows_at_once=2)
    assert rows["x"].tolist() == [0, 2, 4, 6, 8]
    assert reader.requests == [[0, 1], [2, 3], [4]]


def test_numbers_may_be_larger_than_32_bits():
    assert take(Reader(), [2**40, 2**40], [0, 1])["x"].tolist() == [2**41] * 2


def read_floats(numbers):
    return {"x": numbers / 2}


def test_rows_of_other_types_are_named():
    message = r"An example of the numbers 3 to 7 of `data` has other types.*\n  x: "
    with pytest.raises(TypeError, match=message + r"float64 \(\), but int64 \(\) in"):
        take(read_floats, [7, 3], [0, 0])
    with pytest.raises(TypeError, match=r"^Example 3 of `data` has other types"):
        take(read_floats, [3], [0])


class Rows:
    def __len__(self):
        return len(VALUES)

    def __getitem__(self, number):
        return {"x": VALUES[number]}


def make_records(tmp_path, **options):
    records = [make_record({"x": int(value)}) for value in VALUES]
    path = write_records(tmp_path / "a.tfrecord", records)
    return from_tfrecords(path, {"x": FixedLenFeature((), np.int32)}, **options)


def make_huggingface(tmp_path, **options):
    datasets = pytest.importorskip("datasets")
    return from_huggingface(datasets.Dataset.from_dict({"x": VALUES}), **options)


def make_rows(tmp_path, **options):
    return from_random_access(Rows(), **options)


@pytest.mark.parametrize(
    "make",
    [
        make_rows,
        make_records,
        pytest.param(make_huggingface, marks=pytest.mark.slow),
    ],
)
def test_every_source_with_row_numbers_reads_its_own_rows(make, tmp_path):
    mesh = Mesh(np.array(jax.devices("cpu")[:4]).reshape(2, 2), ("data", "model"))
    layout = MeshLayout(mesh, Several(), ("data",))  # pyright: ignore[reportArgumentType]
    options = {"batch_size": 8, "shuffle_seed": 0}
    source = make(tmp_path, **options)
    expected = list(from_arrays({"x": VALUES}, **options))
    dataset = DistributedDataset(source, layout)

    reads = []
    read_rows = source.read_rows
    source.read_rows = lambda rows: reads.append(len(rows)) or read_rows(rows)
    batches = list(dataset)

    assert len(batches) == 2
    for batch, other in zip(batches, expected, strict=True):
        np.testing.assert_array_equal(batch["x"], other["x"])
    # Two devices of an axis have the same rows.
    assert sum(reads) <= len(VALUES) + 1
