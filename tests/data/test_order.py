"""Tests that a position is refused for data in a different order."""

import functools
import json

import grain
import ml_dtypes
import numpy as np
import pytest

import armillary
from armillary.data import FixedLenFeature, InputOptions, from_arrays, from_tfrecords
from armillary.data.sources import _arrays
from armillary.errors import DatasetStateError
from tests.data.contract import make_grain_loader
from tests.problems import make_strategy
from tests.records import make_record, write_records

strategy = armillary.distribute.DefaultStrategy()


def make_arrays(values=None, **options):
    values = np.arange(20) if values is None else values
    return from_arrays(
        {"x": values}, **({"batch_size": 5, "shuffle_seed": 0} | options)
    )


def make_records(tmp_path, values=range(20), size=1, **options):
    records = [make_record({"x": [value] * size, "y": value}) for value in values]
    path = write_records(tmp_path / "a.tfrecord", records)
    features = {"x": FixedLenFeature((size,), np.int32)}
    return from_tfrecords(path, features, **({"batch_size": 5} | options))


def make_grain(seed=0, batch_size=5, num_examples=20):
    numbers = grain.MapDataset.range(num_examples)
    return (numbers if seed is None else numbers.shuffle(seed=seed)).batch(batch_size)


def make_grain_iter(seed=0, batch_size=5):
    numbers = grain.MapDataset.range(20).shuffle(seed=seed)
    return numbers.to_iter_dataset().batch(batch_size)


def save(source, num_batches=2, **options):
    """Returns the position after some batches, as a checkpoint holds it."""
    dataset = strategy.distribute_dataset(source, InputOptions(**options))
    iterator = iter(dataset)
    for _ in range(num_batches):
        next(iterator, None)
    return json.loads(json.dumps(dataset.get_state()))


def restore(source, state, **options):
    dataset = strategy.distribute_dataset(source, InputOptions(**options))
    dataset.set_state(state)
    return np.concatenate([np.ravel(batch["x"]) for batch in dataset]).tolist()


# The function that makes the data, the change, and its text in the message.
CHANGES = {
    "seed": (make_arrays, {"shuffle_seed": 1}, "shuffle_seed: 0 {}, 1 {}"),
    "size": (make_arrays, {"values": np.arange(21)}, "examples: 20 {}, 21 {}"),
    "values": (
        make_arrays,
        {"values": np.arange(20)[::-1]},
        "array x: int64 (20,) #b703573f {}, int64 (20,) #",
    ),
    "order of files": (make_records, {"values": reversed(range(20))}, "records: #"),
    "seed of Grain": (make_grain, {"seed": 1}, "shuffle seed: [0] {}, [1] {}"),
    "no shuffle of Grain": (make_grain, {"seed": None}, "seed: [0] {}, [] {}"),
    "seed below iterators": (make_grain_iter, {"seed": 1}, "seed: [0] {}, [1] {}"),
    "batches of Grain": (make_grain, {"batch_size": 4}, "batch size: [5] {}, [4] {}"),
    "size of Grain": (make_grain, {"num_examples": 25}, "examples: [20] {}, [25] {}"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_another_order_is_an_error_and_changes_nothing(change, tmp_path):
    make, changed, line = CHANGES[change]
    if make is make_records:
        make = functools.partial(make_records, tmp_path)
    state = save(make())
    other = strategy.distribute_dataset(make(**changed))
    iterator = iter(other)
    next(iterator)
    before = other.get_state()
    with pytest.raises(DatasetStateError) as caught:
        other.set_state(state)
    message = str(caught.value)
    assert "saved from other data, or from another order" in message
    assert line.format("in the state", "in the program") in message
    assert "Pass the data and the seed that the state was saved with" in message
    assert other.get_state() == before
    # A release that saved none of this compares nothing but the size.
    del state["order"]
    if "size" not in change:
        other.set_state(state)


def test_a_shuffle_of_another_release_of_numpy_is_refused(monkeypatch):
    arrays = {"x": np.arange(8)}
    plain = save(from_arrays(arrays, batch_size=2))
    state = save(from_arrays(arrays, batch_size=2, shuffle_seed=1))

    def reverse(count, seed, *numbers):
        return np.arange(count)[::-1]

    monkeypatch.setattr(_arrays, "make_order", reverse)
    other = strategy.distribute_dataset(from_arrays(arrays, batch_size=2))
    other.set_state(plain)
    other = from_arrays(arrays, batch_size=2, shuffle_seed=1)
    with pytest.raises(
        DatasetStateError, match=r"shuffle of NumPy: #.*in the state, #"
    ):
        strategy.distribute_dataset(other).set_state(state)


def test_a_loader_of_grain_compares_its_sampler():
    state = save(make_grain_loader(shuffle_seed=2))
    other = strategy.distribute_dataset(make_grain_loader(shuffle_seed=1))
    with pytest.raises(DatasetStateError, match=r"(?s)seed=2.*seed=1"):
        other.set_state(state)


@pytest.mark.parametrize("num_replicas", [1, 2])
def test_options_that_keep_the_order_may_change(num_replicas, tmp_path):
    state = save(make_arrays())
    rows = restore(make_arrays(), state)
    assert len(rows) == 10
    for changed in (
        make_arrays(batch_size=2),
        make_arrays(drop_remainder=True),
        make_arrays(np.arange(20).copy()),
    ):
        assert restore(changed, state) == rows
        assert restore(changed, state, place_on_device=True) == rows
        moved = make_strategy(num_replicas).distribute_dataset(changed)
        moved.set_state(state)
        assert moved.get_state() == state
    resident = save(make_arrays(), place_on_device=True)
    assert restore(make_arrays(), resident) == rows
    # Other features of the same records, and other batches of what counts examples.
    state = save(make_records(tmp_path))
    source = from_tfrecords(
        tmp_path / "a.tfrecord",
        {"x": FixedLenFeature((1,), np.int64), "y": FixedLenFeature((), np.int32)},
        batch_size=3,
    )
    assert restore(source, state) == list(range(10, 20))
    state = save(make_grain_iter())
    changed = make_grain_iter(batch_size=2)
    moved = strategy.distribute_dataset(changed)
    moved.set_state(state)
    assert sum(len(batch) for batch in moved) == 10


def test_the_passes_of_repeated_data_count_where_it_no_longer_repeats():
    state = save(make_arrays(repeat=True), num_batches=10)
    dataset = strategy.distribute_dataset(make_arrays())
    dataset.set_state(state)
    passes = [np.concatenate([batch["x"] for batch in dataset]) for _ in range(2)]
    expected = strategy.distribute_dataset(make_arrays())
    rows = [np.concatenate([batch["x"] for batch in expected]) for _ in range(4)]
    rows = np.concatenate([rows[2][10:], rows[3]])  # Ten batches are 2.5 passes.
    np.testing.assert_array_equal(np.concatenate(passes), rows)
    assert dataset.get_state()["epoch"] == 3


@pytest.mark.parametrize("num_batches", [0, 5])
def test_between_two_passes_other_data_may_follow(num_batches):
    # The end of a pass is seen when nothing follows its last batch.
    state = save(make_arrays(), num_batches)
    assert "order" not in state
    assert len(restore(make_arrays(np.arange(23), shuffle_seed=1), state)) == 23


@pytest.mark.parametrize(
    "dtype", [np.int8, np.float64, bool, np.complex64, ml_dtypes.bfloat16]
)
def test_a_fingerprint_sees_each_changed_value(dtype):
    array = np.zeros((4, 3), dtype)
    expected = from_arrays(array, batch_size=1).order_of_examples
    same = from_arrays(np.asfortranarray(array), batch_size=1)
    assert same.order_of_examples == expected
    for place in np.ndindex(array.shape):
        changed = array.copy()
        changed[place] = 1
        assert from_arrays(changed, batch_size=1).order_of_examples != expected


def test_a_fingerprint_of_large_arrays_reads_rows_from_end_to_end(monkeypatch):
    monkeypatch.setattr(_arrays, "_MAX_BYTES", 2**20)
    array = np.zeros((2**20 + 1, 1), np.int8)
    expected = from_arrays(array, batch_size=1).order_of_examples
    for row in (0, 2**20):
        changed = array.copy()
        changed[row] = 1
        assert from_arrays(changed, batch_size=1).order_of_examples != expected
    array[1] = 1  # Not one of the 1,024 rows.
    assert from_arrays(array, batch_size=1).order_of_examples == expected
