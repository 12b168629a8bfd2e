"""Tests of `make_distributed_dataset`."""

import numpy as np
import pytest

from armillary.data import from_arrays
from armillary.distribute import make_distributed_dataset


@pytest.fixture
def strategy(make_mirrored):
    return make_mirrored(2)


def rows_of(dataset, strategy):
    return [
        [np.asarray(row).tolist() for row in strategy.local_results(batch)]
        for batch in dataset
    ]


EXPECTED = [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]


def test_a_dataset_is_split(strategy):
    dataset = from_arrays(np.arange(8), batch_size=4)
    assert rows_of(make_distributed_dataset(strategy, dataset), strategy) == EXPECTED


def test_the_result_of_a_function_is_split(strategy):
    def make_data(size, *, batch_size):
        return from_arrays(np.arange(size), batch_size=batch_size)

    dataset = make_distributed_dataset(strategy, make_data, 8, batch_size=4)
    assert rows_of(dataset, strategy) == EXPECTED


def test_a_function_with_an_input_context_makes_replica_batches(strategy):
    def make_shard(size, *, input_context, batch_size):
        assert input_context.num_replicas_in_sync == 2
        batch_size = input_context.get_per_replica_batch_size(batch_size)
        return from_arrays(np.arange(size), batch_size=batch_size)

    dataset = make_distributed_dataset(strategy, make_shard, 8, batch_size=4)
    assert rows_of(dataset, strategy) == EXPECTED


def test_a_generator_function_begins_again(strategy):
    def generate(size):
        for start in range(0, size, 4):
            yield np.arange(start, start + 4)

    dataset = make_distributed_dataset(strategy, generate, 8)
    assert rows_of(dataset, strategy) == EXPECTED
    assert rows_of(dataset, strategy) == EXPECTED


def test_arguments_without_a_function_are_an_error(strategy):
    with pytest.raises(TypeError, match="got 3, batch_size for a function, but"):
        make_distributed_dataset(strategy, [np.arange(4)], 3, batch_size=4)


def test_without_a_strategy_it_is_the_one_in_effect(strategy):
    source = from_arrays(np.arange(8), batch_size=4)
    with strategy.scope():
        dataset = make_distributed_dataset(None, source)
    assert rows_of(dataset, strategy) == EXPECTED
    assert [b.tolist() for b in make_distributed_dataset(None, source)] == [
        [0, 1, 2, 3],
        [4, 5, 6, 7],
    ]
