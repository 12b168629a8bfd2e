import numpy as np
import pytest

from armillary.data import DistributedDataset, from_arrays
from tests.feeds import open_feed, open_reader


@pytest.fixture
def dataset(make_layout):
    source = from_arrays(np.arange(14), batch_size=6)
    return DistributedDataset(source, make_layout(4))


def get_index(dataset):
    source = dataset.get_state()["source"]
    return 0 if source is None else source["index"]


def test_peek_does_not_take(dataset):
    reader = open_reader(dataset, exact=True)
    first = reader.peek()
    assert reader.peek() is first
    assert next(reader) is first
    assert reader.peek() is not first
    assert len(list(reader)) == 4
    assert reader.peek() is None


def test_the_first_piece_of_a_batch_does_not_lose_the_second(dataset):
    feed = open_feed(dataset, exact=True)
    positions = []
    for _ in feed.readers[0]:
        feed.commit_taken()
        positions.append(get_index(dataset))
    # Two batches of 6 make a piece of 4 and one of 2 each; the last 2 rows are one.
    assert positions == [0, 6, 6, 12, 14]


def test_the_end_counts_once_it_was_seen_and_all_is_used(dataset):
    feed = open_feed(dataset, exact=True)
    for _ in feed.readers[0]:
        pass
    assert feed.peek() == [None]
    assert not dataset.get_state()["exhausted"]
    feed.commit_taken()
    assert not dataset.get_state()["exhausted"]
    assert feed.peek() == [None]
    assert dataset.get_state()["exhausted"]


def test_reading_on_does_not_change_a_restored_position(make_layout):
    class Positioned:
        state = 0

        def __iter__(self):
            return self

        def __next__(self):
            self.state["index"] += 1
            return np.arange(4)

        def get_state(self):
            return self.state

        def set_state(self, state):
            self.state = state

    dataset = DistributedDataset(Positioned, make_layout(2))
    state = dataset.get_state() | {"source": {"index": 3}}
    dataset.set_state(state)
    next(open_reader(dataset))
    assert dataset.get_state() == state


def test_a_feed_that_was_replaced_does_not_move_the_position(dataset):
    old = open_feed(dataset, exact=True)
    next(old.readers[0])
    following = open_feed(dataset, exact=True)
    old.commit_taken()
    state = dataset.get_state()
    assert (state["epoch"], state["source"]) == (1, None)
    following.close()
