"""Tests of `from_arrays`: batches, order, repetition and positions."""

import jax.numpy as jnp
import numpy as np
import pytest

from armillary.data import from_arrays, from_random_access
from armillary.errors import BatchSizeError, DatasetStateError


def take(iterator, count):
    return [next(iterator) for _ in range(count)]


def test_drop_remainder_leaves_out_the_partial_batch():
    dataset = from_arrays(np.arange(10), batch_size=4, drop_remainder=np.bool_(True))
    assert [len(batch) for batch in dataset] == [4, 4]


@pytest.mark.parametrize("name", ["arrays", "examples"])
def test_methods_of_tensorflow_are_answered(name):
    examples = [{"x": np.float32(row)} for row in range(10)]
    dataset = {
        "arrays": from_arrays(np.arange(10), batch_size=4),
        "examples": from_random_access(examples, batch_size=4),
    }[name]
    answers = {
        "batch": r"`armillary.data.from_arrays\(arrays, batch_size=...\)`",
        "map": "in the step",
        "prefetch": "Leave it out",
        "repeat": "repeat=True",
        "shuffle": "shuffle_seed=0",
        "take": "limit the steps",
    }
    for method, answer in answers.items():
        with pytest.raises(AttributeError, match=answer):
            getattr(dataset, method)
    assert not hasattr(dataset, "other")


def test_leaves_stay_together_and_jax_arrays_are_accepted():
    arrays = {"x": jnp.arange(7) * 10, "y": (np.arange(14).reshape(7, 2),)}
    for batch in from_arrays(arrays, batch_size=3, shuffle_seed=0):
        assert np.array_equal(batch["x"] // 10, batch["y"][0][:, 0] // 2)


def test_batches_do_not_share_memory_with_the_arrays():
    array = np.arange(4)
    batch = next(iter(from_arrays(array, batch_size=4)))
    batch[:] = -1
    assert array.tolist() == [0, 1, 2, 3]


def test_order_depends_on_seed_and_epoch_alone():
    dataset = from_arrays(np.arange(20), batch_size=20, shuffle_seed=5)
    expected = np.random.Generator(np.random.PCG64([5, 7])).permutation(20)
    assert np.array_equal(next(dataset.make_iterator(7)), expected)


@pytest.mark.parametrize("batch_size", [1, 3, 7, 10, 25])
def test_repeat_gives_full_batches_and_every_example_once_per_epoch(batch_size):
    dataset = from_arrays(
        np.arange(10), batch_size=batch_size, shuffle_seed=1, repeat=True
    )
    batches = take(iter(dataset), 40)
    assert all(len(batch) == batch_size for batch in batches)
    rows = np.concatenate(batches)
    for epoch in range(len(rows) // 10):
        assert sorted(rows[epoch * 10 : epoch * 10 + 10]) == list(range(10))


def test_repeat_runs_through_the_same_epochs():
    epochs, endless = (
        from_arrays(np.arange(10), batch_size=5, shuffle_seed=1, repeat=repeat)
        for repeat in [False, True]
    )
    expected = [batch for _ in range(3) for batch in epochs]
    assert np.array_equal(take(iter(endless), 6), expected)


@pytest.mark.parametrize("repeat", [False, True])
def test_position_continues_with_another_batch_size(repeat):
    def make(batch_size):
        return from_arrays(
            np.arange(23), batch_size=batch_size, shuffle_seed=2, repeat=repeat
        ).make_iterator(0)

    whole = next(make(23)).tolist()
    first = make(4)
    used = np.concatenate(take(first, 3)).tolist()
    second = make(11)
    second.set_state(first.get_state())
    assert used + next(second).tolist() == whole


@pytest.mark.parametrize(
    "change", [{"index": 5}, {"index": -1}, {"epoch": -1}, {"num_examples": 5}]
)
def test_a_position_that_is_no_place_in_the_data_is_an_error(change):
    iterator = from_arrays(np.arange(4), batch_size=2).make_iterator(0)
    with pytest.raises(DatasetStateError, match="which is not a place in 4 examples"):
        iterator.set_state(iterator.get_state() | change)


def test_a_pass_without_a_full_batch_is_an_error():
    with pytest.raises(BatchSizeError, match="`batch_size` is 8, but there are 3 ex"):
        from_arrays(np.arange(3), batch_size=8, drop_remainder=True)
