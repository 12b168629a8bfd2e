import numpy as np
import pytest

from armillary.data import DistributedDataset, from_arrays


@pytest.fixture
def dataset(make_layout):
    source = from_arrays(np.arange(14), batch_size=6)
    return DistributedDataset(source, make_layout(4))


def get_index(dataset):
    source = dataset.get_state()["source"]
    return 0 if source is None else source["index"]


def test_peek_does_not_take(dataset):
    reader = dataset.make_reader(exact=True)
    first = reader.peek()
    assert reader.peek() is first
    assert next(reader) is first
    assert reader.peek() is not first
    assert len(list(reader)) == 4
    assert reader.peek() is None


def test_only_commit_moves_the_position(dataset):
    reader = dataset.make_reader(exact=True)
    batches = list(reader)
    assert get_index(dataset) == 0
    reader.commit(batches[3].position)
    assert get_index(dataset) == 12


def test_the_first_piece_of_a_batch_does_not_lose_the_second(dataset):
    reader = dataset.make_reader(exact=True)
    positions = []
    for batch in reader:
        reader.commit(batch.position)
        positions.append(get_index(dataset))
    # Two batches of 6 make a piece of 4 and one of 2 each; the last 2 rows are one.
    assert positions == [0, 6, 6, 12, 14]


def test_the_end_counts_when_the_last_batch_is_committed(dataset):
    reader = dataset.make_reader(exact=True)
    batches = list(reader)
    reader.commit_end()
    assert not dataset.get_state()["exhausted"]
    reader.commit(batches[-1].position)
    assert dataset.get_state()["exhausted"]


def test_the_end_does_not_count_before_it_was_reached(dataset):
    reader = dataset.make_reader(exact=True)
    reader.commit(next(reader).position)
    reader.commit_end()
    assert not dataset.get_state()["exhausted"]


def test_positions_read_before_a_move_have_no_effect(dataset):
    reader = dataset.make_reader(exact=True)
    start = dataset.get_state()
    batches = list(reader)
    dataset.set_state(start)
    assert not reader.is_current(batches[-1].position)
    reader.commit(batches[-1].position)
    assert get_index(dataset) == 0
    assert len(list(reader)) == 5


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
    reader = dataset.make_reader(exact=False)
    next(reader)
    assert dataset.get_state() == state


def test_a_reader_that_was_replaced_does_not_move_the_position(dataset):
    old = dataset.make_reader(exact=True)
    batch = next(old)
    dataset.make_reader(exact=True)
    old.commit(batch.position)
    state = dataset.get_state()
    assert (state["epoch"], state["source"]) == (1, None)


def test_a_closed_reader_is_at_its_end_and_keeps_the_position(dataset):
    reader = dataset.make_reader(exact=True)
    next(reader)
    reader.commit(next(reader).position)
    reader.close()
    assert list(reader) == []
    assert get_index(dataset) == 6


def test_an_error_is_raised_again(make_layout):
    def generate():
        yield np.arange(4)
        raise OSError("gone")

    reader = DistributedDataset(generate, make_layout(2)).make_reader(exact=False)
    next(reader)
    for _ in range(2):
        with pytest.raises(OSError, match="gone"):
            next(reader)
