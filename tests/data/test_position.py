"""Tests of the position in a checkpoint, and of how reading moves it."""

import json
import random

import numpy as np
import pytest

from armillary.data import DistributedDataset, InputOptions, from_arrays
from armillary.data.feed._position import (
    Position,
    decode_position,
    encode_position,
)
from armillary.errors import DatasetStateError
from tests import problems
from tests.feeds import open_feed, open_reader

EXACT = InputOptions(remainder="exact")


def test_states_of_many_types_survive_json():
    state = {
        "bytes": b"\x00\xff",
        "list": [1.5, None, {"c": "d"}],
        "number": np.int64(2**40),
        "rng": random.Random(0).getstate(),  # Tuples, as `random.setstate` wants them.
        "words": np.arange(3, dtype=np.uint32),
    }
    position = Position(2, state, 8, True)
    saved = json.loads(json.dumps(encode_position(position, "arrays")))
    restored = decode_position(saved, "arrays")
    words = restored.source.pop("words")
    assert (words.dtype, words.tolist()) == (np.uint32, [0, 1, 2])
    del state["words"]
    assert restored == position


@pytest.mark.parametrize("state", [object(), {1: 2}, {"a": {3}}])
def test_states_that_json_cannot_hold_are_errors(state):
    with pytest.raises(DatasetStateError, match="which a position cannot hold"):
        encode_position(Position(source=state), "arrays")


def test_another_kind_shows_both_sides():
    state = encode_position(Position(), "grain.MapDataset")
    with pytest.raises(DatasetStateError, match=r"grain\.MapDataset, and not arrays"):
        decode_position(state, "arrays")


@pytest.fixture
def dataset(make_layout):
    source = from_arrays(np.arange(14), batch_size=6)
    return DistributedDataset(source, make_layout(4))


def get_index(dataset):
    source = dataset.get_state()["source"]
    return 0 if source is None else source["index"]


def test_the_first_piece_of_a_batch_does_not_lose_the_second(dataset):
    feed = open_feed(dataset, in_pieces=True)
    positions = []
    for _ in feed.readers[0]:
        feed.commit_taken()
        positions.append((feed.positions[0].source or {"index": 0})["index"])
    # Two batches of 6 make a piece of 4 and one of 2 each; the last 2 rows are one.
    assert positions == [0, 6, 6, 12, 14]


def test_reading_on_does_not_change_a_restored_position(make_layout):
    class Positioned(problems.Positioned):
        batches = [np.arange(4)] * 9

    dataset = DistributedDataset(Positioned, make_layout(2))
    state = dataset.get_state() | {"source": {"index": 3}}
    dataset.set_state(state)
    next(open_reader(dataset))
    assert dataset.get_state() == state


def test_a_feed_that_was_replaced_does_not_move_the_position(dataset):
    dataset = DistributedDataset(dataset.source, dataset.layout, options=EXACT)
    old = open_feed(dataset)
    next(old.readers[0])
    following = open_feed(dataset)
    old.commit_taken()
    state = dataset.get_state()
    assert (state["epoch"], state["source"]) == (1, None)
    following.close()
