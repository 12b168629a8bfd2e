"""Tests of the examples of a Grain dataset, read by number."""

import itertools

import grain
import jax
import numpy as np
import pytest

from armillary.data import as_source
from armillary.data.sources._arrays import find_indexed
from armillary.errors import DatasetStateError


class AddNoise(grain.transforms.RandomMap):
    # The base class has no annotation, and only raises.
    def random_map(self, element, rng):  # pyright: ignore[reportIncompatibleMethodOverride]
        return {"x": element + rng.random(2), "n": element}


def make_numbers(count=23):
    return grain.MapDataset.range(count).seed(3)


def make_mix():
    parts = [make_numbers(10), make_numbers(30).map(lambda number: number + 100)]
    return grain.MapDataset.mix(parts, weights=[0.3, 0.7])


DATASETS = {
    "a range": lambda: make_numbers().batch(4),
    "dropped": lambda: make_numbers().batch(4, drop_remainder=True),
    "shuffled": lambda: make_numbers().shuffle().batch(5),
    "random": lambda: make_numbers().shuffle().random_map(AddNoise()).batch(5),
    "repeated": lambda: make_numbers().shuffle().repeat(3).batch(6),
    "endless": lambda: make_numbers().shuffle().repeat().batch(6),
    "mixed": lambda: make_mix().batch(4),
    "sliced": lambda: make_numbers()[2:19:3].batch(4),
    "iterated": lambda: (
        make_numbers()
        .repeat()
        .batch(6)
        .to_iter_dataset(grain.ReadOptions(num_threads=2))
    ),
}


def make_indexed(make):
    indexed = find_indexed(as_source(make()))
    assert indexed is not None
    return indexed


@pytest.mark.parametrize("name", DATASETS)
def test_examples_by_number_give_the_batches_and_positions_of_grain(name):
    make = DATASETS[name]
    expected = as_source(make()).make_iterator(0)
    iterator = make_indexed(make).make_iterator(0)
    states = []
    for batch in itertools.islice(iterator, 9):
        other = next(expected)
        assert jax.tree.structure(batch) == jax.tree.structure(other)
        jax.tree.map(np.testing.assert_array_equal, batch, other)
        assert [leaf.dtype for leaf in jax.tree.leaves(batch)] == [
            leaf.dtype for leaf in jax.tree.leaves(other)
        ]
        states.append(iterator.get_state())
        assert states[-1] == expected.get_state()
    is_endless = name in ("endless", "iterated")
    assert len(states) == {"dropped": 5, "sliced": 2}.get(name, len(states))
    if len(states) < 9:
        assert not is_endless
        with pytest.raises(StopIteration):
            next(expected)

    for first, second in ((as_source(make()), make_indexed(make)),) * 2:
        middle = first.make_iterator(0)
        middle.set_state(states[0])
        again = second.make_iterator(0)
        again.set_state(middle.get_state())
        jax.tree.map(np.testing.assert_array_equal, next(again), next(middle))


@pytest.mark.parametrize("next_index", [-1, 7])
def test_a_position_that_is_no_place_in_the_data_is_an_error(next_index):
    iterator = make_indexed(DATASETS["a range"]).make_iterator(0)
    iterator.set_state({"next_index": 6})
    with pytest.raises(DatasetStateError, match="not a place in 23 examples in batch"):
        iterator.set_state({"next_index": next_index})


OTHERS = {
    "a function that makes batches": lambda: make_numbers().batch(4, batch_fn=np.stack),
    "a map of batches": lambda: make_numbers().batch(4).map(lambda batch: batch + 1),
    "batches that repeat": lambda: make_numbers().batch(4).repeat(),
    "a stream": lambda: make_numbers().to_iter_dataset().batch(4),
    "no batches": lambda: make_numbers(3).batch(4, drop_remainder=True),
}


@pytest.mark.parametrize("other", OTHERS)
def test_other_datasets_are_iterated(other):
    assert find_indexed(as_source(OTHERS[other]())) is None


def test_a_comparison_of_an_endless_dataset_reads_its_first_examples():
    order = make_indexed(DATASETS["endless"]).order_of_examples
    assert order["shuffle seed"] != []
    assert order["rows"].startswith("#")
