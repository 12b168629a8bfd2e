"""Tests of chunks: the batches of many steps, stacked for one program."""

import time
from unittest.mock import Mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from armillary.data import DistributedDataset, from_arrays
from armillary.errors import BatchSizeError
from tests.feeds import open_chunks, read_chunks

pytestmark = pytest.mark.usefixtures("prefetch_threads")


@pytest.fixture
def make_dataset(make_layout):
    def make(source, num_replicas=2, **arguments):
        return DistributedDataset(source, make_layout(num_replicas), **arguments)

    return make


def unstack(chunk, reader=0):
    """Returns the batches of the steps that have data."""
    arrays = chunk.arrays[reader]
    count = len(arrays) // chunk.capacity * chunk.num_steps
    return [arrays[index].tolist() for index in range(count)]


def test_batches_without_a_byte_are_chunks_too(make_dataset):
    dataset = make_dataset([np.zeros((4, 0))] * 3)
    chunks = read_chunks(open_chunks(dataset, steps_per_chunk=2))
    assert [chunk.num_steps for chunk in chunks] == [2, 1]


@settings(max_examples=100, deadline=None)
@given(
    size=st.integers(1, 40),
    batch_size=st.integers(1, 9),
    num_replicas=st.integers(1, 4),
    steps_per_chunk=st.integers(1, 12),
    prefetch=st.integers(0, 2),
)
def test_chunks_hold_the_same_sequence_however_they_are_cut(
    size, batch_size, num_replicas, steps_per_chunk, prefetch, make_layout, read_all
):
    source = from_arrays(np.arange(size), batch_size=batch_size, shuffle_seed=0)
    dataset = DistributedDataset(source, make_layout(num_replicas))
    other = DistributedDataset(source, make_layout(num_replicas))
    expected = [
        (batch.arrays.tolist(), batch.active) for batch in read_all(dataset, True)
    ]
    chunks = read_chunks(
        open_chunks(
            other, in_pieces=True, steps_per_chunk=steps_per_chunk, prefetch=prefetch
        )
    )
    seen = [(batch, chunk.active[0]) for chunk in chunks for batch in unstack(chunk)]
    assert seen == expected
    assert all(1 <= chunk.num_steps <= chunk.capacity for chunk in chunks)
    assert all(len(chunk.arrays[0]) == chunk.capacity for chunk in chunks)
    assert all(len(chunk.positions) == chunk.num_steps for chunk in chunks)
    # One program for each shape.
    shapes = {(c.arrays[0].shape, c.active) for c in chunks}
    assert len(shapes) == len({(c.arrays[0].shape[1:], c.active) for c in chunks})


def test_each_shape_has_chunks_of_its_own(make_dataset):
    sizes = [4, 4, 4, 6, 6, 4]
    dataset = make_dataset([np.zeros(size) for size in sizes])
    chunks = read_chunks(open_chunks(dataset, steps_per_chunk=3))
    assert [(c.num_steps, c.capacity, c.arrays[0].shape[1:]) for c in chunks] == [
        (3, 3, (2, 2)),
        (2, 2, (2, 3)),
        (1, 3, (2, 2)),
    ]


def test_steps_may_take_several_batches_of_several_datasets(make_dataset):
    first = make_dataset(from_arrays(np.arange(16), batch_size=2))
    second = make_dataset(from_arrays(np.arange(100, 112), batch_size=4))
    chunks = read_chunks(
        open_chunks(first, second, batches_per_step=(2, 1), steps_per_chunk=2)
    )
    assert [chunk.num_steps for chunk in chunks] == [2, 1]
    assert chunks[0].arrays[0].shape == (4, 2, 1)
    assert chunks[0].arrays[1].shape == (2, 2, 2)
    assert [np.ravel(unstack(c, 0)).tolist() for c in chunks] == [
        [0, 1, 2, 3, 4, 5, 6, 7],
        [8, 9, 10, 11],
    ]
    assert unstack(chunks[1], 1) == [[[108, 109], [110, 111]]]


def test_a_step_that_lacks_a_batch_does_not_happen(make_dataset):
    dataset = make_dataset(from_arrays(np.arange(10), batch_size=2))
    feed = open_chunks(dataset, batches_per_step=(2,), steps_per_chunk=10)
    chunk = feed.next_chunk()
    assert chunk.num_steps == 2
    feed.commit(2)
    for _ in range(2):
        assert feed.next_chunk() is None
    state = dataset.get_state()
    assert (state["source"]["index"], state["exhausted"]) == (10, True)


@pytest.mark.parametrize(
    ("has_position", "prefetch"), [(True, 2), (False, 0), (False, 1)]
)
def test_set_state_drops_what_was_read_ahead_and_other_data_continue(
    make_dataset, has_position, prefetch
):
    numbers = np.arange(100, 120)
    source = from_arrays(numbers, batch_size=2)
    first = make_dataset(from_arrays(np.arange(20), batch_size=2))
    second = make_dataset(source if has_position else list(source))
    start = first.get_state()
    feed = open_chunks(
        first, second, batches_per_step=(1, 1), steps_per_chunk=2, prefetch=prefetch
    )
    # Data without positions go on from where they were read to, whole chunks.
    for num_steps in (2, 1)[: 1 + has_position]:
        feed.next_chunk()
        feed.commit(num_steps)
    time.sleep(0.01)
    first.set_state(start)
    following = feed.next_chunk()
    assert unstack(following, 0) == [[[0], [1]], [[2], [3]]]
    used = 106 if has_position else 104
    assert unstack(following, 1)[0] == [[used], [used + 1]]
    feed.close()


@pytest.mark.parametrize("prefetch", [0, 2])
def test_an_interrupted_seek_continues_from_what_was_used(
    make_dataset, prefetch, monkeypatch
):
    dataset = make_dataset(from_arrays(np.arange(20), batch_size=2))
    feed = open_chunks(dataset, steps_per_chunk=4, prefetch=prefetch)
    start = feed.positions
    feed.next_chunk()
    feed.commit(3)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(dataset.input, "read", Mock(side_effect=KeyboardInterrupt))
        feed.seek(start)
    assert unstack(feed.next_chunk())[0] == [[6], [7]]
    feed.close()


def test_chunks_do_not_share_host_memory(make_dataset):
    dataset = make_dataset(from_arrays(np.arange(12), batch_size=2))
    chunks = read_chunks(open_chunks(dataset, steps_per_chunk=2, prefetch=0))
    for index, chunk in enumerate(chunks):
        for other in chunks[:index]:
            assert not np.shares_memory(chunk.arrays[0], other.arrays[0])


@pytest.mark.parametrize("prefetch", [0, 1])
@pytest.mark.parametrize("steps_per_chunk", [1, 2, 10])
def test_steps_before_an_error_come_first(make_dataset, steps_per_chunk, prefetch):
    def generate():
        for _ in range(3):
            yield np.zeros(2)
        raise OSError("the disk is gone")

    feed = open_chunks(
        make_dataset(generate), steps_per_chunk=steps_per_chunk, prefetch=prefetch
    )
    num_steps = 0
    for _ in range(2):
        with pytest.raises(OSError, match="the disk is gone"):
            while True:
                num_steps += feed.next_chunk().num_steps
                feed.commit(feed.chunk.num_steps)
    assert num_steps == 3


def test_batches_of_one_step_must_have_one_shape(make_dataset):
    dataset = make_dataset([{"x": np.zeros(4)}, {"x": np.zeros(2)}])
    feed = open_chunks(dataset, batches_per_step=(2,), steps_per_chunk=4)
    message = (
        r"(?s)^One step takes 2 batches of dataset 0.*\n  x: float32 \(2, 2\) on 2 rep"
        r'.*\n  x: float32 \(2, 1\) on 2 rep.*InputOptions\(remainder="drop"\)'
    )
    with pytest.raises(BatchSizeError, match=message):
        feed.next_chunk()
