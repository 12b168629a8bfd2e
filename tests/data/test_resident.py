"""Tests of data that stays on the device: the same batches, sent as row numbers."""

import gc
import itertools
import json
import weakref
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
import pytest

import armillary
from armillary.data import (
    DistributedDataset,
    InputOptions,
    from_arrays,
)
from tests.feeds import open_chunks
from tests.problems import make_strategy

MAKERS = {
    "default": armillary.distribute.DefaultStrategy,
    "one device": lambda: armillary.OneDeviceStrategy("cpu:1"),
    "mirrored 1": lambda: make_strategy(1),
    "mirrored 4": lambda: make_strategy(4),
}


@pytest.fixture(params=MAKERS)
def strategy(request):
    return MAKERS[request.param]()


def make_arrays(num_examples=40):
    rng = np.random.default_rng(0)
    return {
        "float64": rng.normal(size=(num_examples, 3)),
        "int64": np.arange(num_examples) - 2**31,
        "nested": (rng.integers(0, 255, (num_examples, 2, 2)).astype(np.uint8),),
        "bool": rng.normal(size=num_examples) > 0,
        "bfloat16": rng.normal(size=num_examples).astype(jax.numpy.bfloat16),
    }


def make_pair(strategy, source, **options):
    """Returns the same dataset twice: sent from the host, and resident."""
    return [
        strategy.distribute_dataset(
            source, InputOptions(place_on_device=is_resident, **options)
        )
        for is_resident in (False, True)
    ]


def assert_same(actual, expected):
    """Asserts that two batches are equal in structure, placement, dtypes and bits."""
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        assert a.sharding.is_equivalent_to(b.sharding, b.ndim)
        assert np.array(a).tobytes() == np.array(b).tobytes()


# The same batches


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize(
    "arguments",
    [
        {"batch_size": 8},
        {"batch_size": 8, "shuffle_seed": 3},
        {"batch_size": 16, "shuffle_seed": 3, "repeat": True},
        {"batch_size": 16, "drop_remainder": True},
    ],
    ids=str,
)
def test_batches_equal_batches_from_the_host(strategy, arguments, prefetch):
    source = from_arrays(make_arrays(), **arguments)
    host, resident = make_pair(strategy, source, prefetch=prefetch)
    for _ in range(3):
        pairs = itertools.zip_longest(
            itertools.islice(host, 7), itertools.islice(resident, 7)
        )
        for expected, actual in pairs:
            assert_same(actual, expected)


def test_arrays_are_placed_again_for_64_bits():
    strategy = armillary.distribute.DefaultStrategy()
    source = from_arrays(make_arrays(), batch_size=8)
    datasets = make_pair(strategy, source)  # They keep the placed arrays.
    assert_same(*map(next, map(iter, datasets)))

    with jax.enable_x64(True):
        host, resident = map(next, map(iter, make_pair(strategy, source)))
        assert_same(resident, host)
    assert host["float64"].dtype == np.float64


@pytest.mark.parametrize("remainder", ["pad", "drop"])
def test_remainders_equal_remainders_from_the_host(strategy, remainder):
    source = from_arrays(make_arrays(37), batch_size=10, shuffle_seed=1)
    host, resident = make_pair(strategy, source, remainder=remainder)
    assert resident.element_spec == host.element_spec
    for expected, actual in zip(host, resident, strict=True):
        assert ("mask" in actual) == (remainder == "pad")
        assert_same(actual, expected)


# Positions


@pytest.mark.parametrize("is_saved_resident", [True, False])
def test_a_position_can_be_restored_with_and_without_it(strategy, is_saved_resident):
    arguments = {"batch_size": 8, "shuffle_seed": 5, "repeat": True}
    source = from_arrays(make_arrays(), **arguments)
    saved, restored = make_pair(strategy, source)
    if is_saved_resident:
        saved, restored = restored, saved
    iterator = iter(saved)
    for _ in range(7):
        next(iterator)

    state = json.loads(json.dumps(saved.get_state()))
    assert "rows" not in str(state["order"])
    restored.set_state(state)
    continued = iter(restored)

    for _ in range(7):
        assert_same(next(continued), next(iterator))
        assert restored.get_state() == saved.get_state()


# Chunks


def test_chunks_hold_row_numbers_and_have_room_for_as_many():
    source = from_arrays(np.zeros((40, 1000), np.float32), batch_size=4)
    host, resident = (
        open_chunks(dataset, steps_per_chunk=20, max_chunk_bytes=6 * 4 * 4).next_chunk()
        for dataset in make_pair(make_strategy(2), source)
    )
    assert (host.capacity, resident.capacity) == (1, 6)
    assert resident.types == host.types
    (rows,) = jax.tree.leaves(resident.arrays)
    assert rows.nbytes == 6 * 4 * 4
    assert host.resident == [None]


# Placed once


class Counting:
    """A layout that counts how often arrays are placed whole."""

    def __init__(self, num_replicas):
        self._layout = make_strategy(num_replicas).layout
        self.num_replicated = 0

    def __getattr__(self, name):
        return getattr(self._layout, name)

    def replicate(self, arrays):
        self.num_replicated += 1
        return self._layout.replicate(arrays)


OPTIONS = InputOptions(place_on_device=True)


def test_arrays_are_placed_at_the_first_batch_and_once_for_all_passes():
    layout = Counting(2)
    source = from_arrays(make_arrays(), batch_size=8)
    dataset = DistributedDataset(source, layout, options=OPTIONS)
    iterators = [iter(dataset) for _ in range(3)]
    assert dataset.element_spec["int64"].shape == (8,)
    assert layout.num_replicated == 0
    for iterator in iterators:
        next(iterator)
    assert layout.num_replicated == 1


def test_datasets_of_one_source_share_the_arrays_of_a_layout():
    source = from_arrays(make_arrays(), batch_size=8)
    layout, other = Counting(2), Counting(4)
    datasets = [
        DistributedDataset(source, each, options=OPTIONS)
        for each in (layout, layout, other)
    ]
    with ThreadPoolExecutor(3) as threads:
        first, second, _ = threads.map(
            lambda each: each.input.gather.resident, datasets
        )
    assert (layout.num_replicated, other.num_replicated) == (1, 1)
    assert first is second


def test_strategies_of_the_same_devices_share_the_arrays_until_the_last_is_gone():
    source = from_arrays(make_arrays(), batch_size=8)
    dataset, other = (
        make_strategy(2).distribute_dataset(source, OPTIONS) for _ in range(2)
    )
    iterator = iter(dataset)
    next(iterator)
    iterator.close()
    assert dataset.input.gather.resident is other.input.gather.resident
    placed = weakref.ref(dataset.input.gather.resident["int64"])
    del dataset, iterator
    gc.collect()
    assert placed() is not None
    del other
    gc.collect()
    assert placed() is None


# Errors


def test_a_source_that_is_not_in_memory_is_an_error():
    message = r"`place_on_device` is True, but the source \(iter.*\) .*`from_arrays`"
    strategy = armillary.distribute.DefaultStrategy()
    with pytest.raises(TypeError, match=message):
        strategy.distribute_dataset([np.zeros(4)], OPTIONS)
    with pytest.raises(TypeError, match=message):
        strategy.distribute_datasets_from_function(lambda _: [np.zeros(4)], OPTIONS)


def test_more_rows_than_32_bits_count_are_an_error():
    array = np.broadcast_to(np.zeros(1, np.int8), (2**31,))
    source = from_arrays(array, batch_size=8)
    with pytest.raises(TypeError, match="no arrays of at most 2147483647 examples"):
        armillary.distribute.DefaultStrategy().distribute_dataset(source, OPTIONS)
