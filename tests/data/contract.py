"""The contract of data sources, for every module that tests a source."""

import json
from collections.abc import Callable
from typing import Any

import grain
import jax
import numpy as np
import pytest

from armillary.data import DistributedDataset, Source, as_source
from armillary.data._layout import BatchLayout
from armillary.data.feed._position import (
    Position,
    decode_position,
    encode_position,
)
from armillary.errors import DatasetStateError
from tests.feeds import open_reader

BATCHES = [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
"""The batches of a source under test: arrays, or dictionaries with one entry."""


def make_grain_loader(
    num_examples: int = 10, batch_size: int = 4, shuffle_seed: int | None = None
) -> grain.DataLoader:
    """Returns a loader of numbers, in this process."""
    return grain.DataLoader(
        data_source=grain.sources.RangeDataSource(0, num_examples, 1),
        sampler=grain.samplers.IndexSampler(
            num_examples,
            shuffle=shuffle_seed is not None,
            seed=shuffle_seed or 0,
            num_epochs=1,
        ),
        operations=[grain.transforms.Batch(batch_size)],
        worker_count=0,
    )


def read(iterator: Any) -> list[list[int]]:
    """Returns the batches to come, as lists."""
    batches = []
    while True:
        try:
            batches.append(_as_list(next(iterator)))
        except StopIteration:
            return batches


def _as_list(batch: Any) -> list[int]:
    (array,) = jax.tree.leaves(batch)
    return np.asarray(array).tolist()


def check_source(
    make: Callable[[], Any], is_repositionable: bool, layout: BatchLayout
) -> None:
    """Checks all rules for new sources that `make` returns.

    Args:
        make: Returns a source of `BATCHES`.
        is_repositionable: Whether it has positions.
        layout: A layout of 4 replicas, with a replica axis.
    """
    _check_passes(make)
    _check_batches_are_kept(make)
    _check_exact_evaluation(make, layout)
    source = as_source(make())
    assert source.is_repositionable == is_repositionable
    # Asking loses no batch.
    assert read(source.make_iterator(0)) == BATCHES
    if not is_repositionable:
        with pytest.raises(DatasetStateError, match="cannot be repositioned"):
            DistributedDataset(source, layout).check_repositionable()
    else:
        for count in range(len(BATCHES) + 1):
            _check_position(make, count)
        _check_positions_are_kept(make)


def _check_passes(make: Callable[[], Any]) -> None:
    """Every pass gives every batch."""
    source = as_source(make())
    assert isinstance(source, Source)
    assert isinstance(source.name, str)
    for epoch in range(3):
        assert read(source.make_iterator(epoch)) == BATCHES


def _check_exact_evaluation(make: Callable[[], Any], layout: BatchLayout) -> None:
    """Replicas that cannot share a batch see each example once all the same."""
    reader = open_reader(DistributedDataset(make(), layout), in_pieces=True)
    seen = []
    for batch in reader:
        (array,) = jax.tree.leaves(reader.data.gather.on_host(batch.arrays))
        seen += np.asarray(array)[list(batch.active)].ravel().tolist()
    assert sorted(seen) == list(range(10))


def _check_batches_are_kept(make: Callable[[], Any]) -> None:
    """Nobody writes to a batch that was handed out."""
    iterator = as_source(make()).make_iterator(0)
    batches = [next(iterator) for _ in BATCHES]
    assert [_as_list(batch) for batch in batches] == BATCHES


def _check_position(make: Callable[[], Any], count: int) -> None:
    """A position survives JSON, and continues in a new source."""
    source = as_source(make())
    iterator = source.make_iterator(0)
    for _ in range(count):
        next(iterator)
    state = encode_position(Position(source=iterator.get_state()), source.name)
    assert read(iterator) == BATCHES[count:]
    again = as_source(make()).make_iterator(0)
    again.set_state(decode_position(json.loads(json.dumps(state)), source.name).source)
    assert read(again) == BATCHES[count:]


def _check_positions_are_kept(make: Callable[[], Any]) -> None:
    """A position does not change when the iterator moves on."""
    iterator = as_source(make()).make_iterator(0)
    next(iterator)
    state = iterator.get_state()
    copy = json.dumps(encode_position(Position(source=state), ""))
    read(iterator)
    assert json.dumps(encode_position(Position(source=state), "")) == copy
