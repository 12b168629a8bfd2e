"""Processes that read data of their own come to one sequence of batches."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from armillary.data import DistributedDataset, InputOptions
from armillary.data.feed._chunks import ChunkBuilder
from armillary.errors import BatchSizeError, PeerError
from tests.feeds import open_feed, open_reader, read_chunks
from tests.peers import run_together


class ProcessLayout:
    """Some replicas in each process; arrays stay on the host."""

    stacked = True

    def __init__(self, peers: Any, num_own: int) -> None:
        self.peers = peers
        self.place = lambda arrays, *_: arrays
        self.num_replicas = peers.count * num_own
        self.local_replicas = range(peers.index * num_own, (peers.index + 1) * num_own)


def read(
    make_batches: Callable[[int], list[Any]],
    *,
    exact: bool,
    num_own: int = 1,
    count: int = 2,
    **options: Any,
) -> list[Any]:
    """Returns for each process its batches: sizes, who has data, and the values."""

    def read_one(peers: Any) -> list[Any]:
        dataset = DistributedDataset(
            make_batches(peers.index),
            ProcessLayout(peers, num_own),
            per_replica_batches=True,
            options=InputOptions(**options),
        )
        return [
            (batch.arrays.shape[1], batch.num_active, batch.arrays.tolist())
            for batch in open_reader(dataset, exact=exact)
        ]

    return run_together(read_one, count)


def batches_of(*sizes: int, start: int = 0) -> list[np.ndarray]:
    return [np.full(size, start + i) for i, size in enumerate(sizes)]


def test_training_ends_with_the_shortest_data():
    first, second = read(lambda i: batches_of(*[4] * (3 - i)), exact=False)
    assert [batch[:2] for batch in first] == [(4, 2), (4, 2)]
    assert [batch[:2] for batch in second] == [(4, 2), (4, 2)]


@pytest.mark.parametrize("prefetch", [0, 1])
@pytest.mark.parametrize("lengths", [(50, 45), (40, 20), (11, 11), (1, 39)])
def test_evaluation_uses_every_batch_of_every_process(lengths, prefetch):
    outcomes = read(
        lambda i: batches_of(*[4] * (lengths[i] - 1), 3, start=100 * i),
        exact=True,
        prefetch=prefetch,
    )
    plans = [[batch[:2] for batch in outcome] for outcome in outcomes]
    assert plans[0] == plans[1]
    for index, outcome in enumerate(outcomes):
        used = [
            row
            for size, active, (rows,) in outcome
            if index in (range(active) if isinstance(active, int) else active)
            for row in rows
        ]
        expected = batches_of(*[4] * (lengths[index] - 1), 3, start=100 * index)
        assert used == np.concatenate(expected).tolist()


def test_larger_batches_run_first_and_the_others_take_part_without_data():
    outcomes = read(lambda i: batches_of(4, 2) if i else batches_of(4, 4), exact=True)
    for outcome in outcomes:
        assert [batch[:2] for batch in outcome] == [(4, 2), (4, 1), (2, (1,))]


@pytest.mark.parametrize("num_large", [19, 20, 21, 40])
def test_a_process_may_have_to_wait_for_its_turn(num_large):
    outcomes = read(
        lambda i: batches_of(2) if i else batches_of(*[4] * num_large), exact=True
    )
    for outcome in outcomes:
        plan = [batch[:2] for batch in outcome]
        assert plan == [(4, 1)] * num_large + [(2, (1,))]


def test_processes_with_two_replicas_count_active_ones_by_number():
    outcomes = read(
        lambda i: batches_of(*[4] * (3 - i)), exact=True, num_own=2, count=2
    )
    # Process 0 has three batches for its two replicas, process 1 has two.
    for outcome in outcomes:
        assert [batch[1] for batch in outcome] == [4, 1]
    outcomes = read(lambda i: batches_of(*[4] * (2 + i)), exact=True, num_own=2)
    for outcome in outcomes:
        assert [batch[1] for batch in outcome] == [4, (2,)]


def test_training_batches_of_different_sizes_are_shown():
    outcomes = read(lambda i: batches_of(*[4 - i] * 3), exact=False)
    for outcome in outcomes:
        with pytest.raises(BatchSizeError, match="batches of the processes differ"):
            raise outcome


def test_uneven_batches_of_data_of_its_own_are_refused_with_what_helps():
    message = '`remainder` is "exact", but each process reads data of its own'
    outcomes = read(lambda i: batches_of(4, 3), exact=False, remainder="exact")
    for outcome in outcomes:
        with pytest.raises(ValueError, match=message):
            raise outcome
    evaluation = read(lambda i: batches_of(4, 3), exact=True, remainder="exact")
    assert [batch[:2] for batch in evaluation[0]] == [(4, 2), (3, 2)]
    uneven = read(lambda i: batches_of(4, 3), exact=False, num_own=2)
    with pytest.raises(BatchSizeError, match="2 replicas take one batch each"):
        raise uneven[0]


def test_batches_of_different_structure_are_shown():
    outcomes = read(lambda i: [np.zeros((4, 2)) if i else np.zeros((4, 3))], exact=True)
    for outcome in outcomes:
        with pytest.raises(BatchSizeError, match=r"process 0: .*float.* \(1, 4, 3\)"):
            raise outcome


def test_a_process_without_any_example_says_so():
    for outcome in read(lambda i: [] if i else batches_of(4), exact=True):
        with pytest.raises(BatchSizeError, match="Process 1 of 2 has no example"):
            raise outcome


def test_no_process_having_any_example_is_an_empty_evaluation():
    assert read(lambda i: [], exact=True) == [[], []]


def test_a_source_that_fails_ends_the_others():
    def make(index: int) -> Any:
        def generate() -> Any:
            yield np.zeros(4)
            if index:
                raise OSError("the disk is gone")
            yield np.zeros(4)

        return generate

    first, second = read(make, exact=True)
    with pytest.raises(OSError, match="the disk is gone"):
        raise second
    with pytest.raises(PeerError, match="process 1 of 2: OSError: the disk is gone"):
        raise first


class Counted:
    """An endless source that knows how far it was read, and is read by one alone."""

    def __init__(self, step: int = 0) -> None:
        self.step, self.num_read, self.readers = step, 0, set()

    def __iter__(self) -> "Counted":
        return self

    def __next__(self) -> np.ndarray:
        self.readers.add(threading.current_thread().name)
        self.step, self.num_read = self.step + 1, self.num_read + 1
        return np.full(4, self.step)

    def get_state(self) -> int:
        return self.step

    def set_state(self, state: int) -> None:
        self.step = state


def make_dataset(peers: Any, source: Any, prefetch: int) -> DistributedDataset:
    return DistributedDataset(
        source,
        ProcessLayout(peers, 1),
        per_replica_batches=True,
        options=InputOptions(prefetch=prefetch),
    )


@pytest.mark.parametrize(("prefetch", "num_read"), [(0, 10), (1, 20)])
def test_a_thread_reads_ahead_what_is_agreed_on_later(prefetch, num_read):
    def run(peers: Any) -> tuple[int, bool]:
        source = Counted()
        reader = open_reader(make_dataset(peers, lambda: source, prefetch))
        next(reader)
        end = time.monotonic() + 30
        while source.num_read < num_read and time.monotonic() < end:
            time.sleep(0.01)
        time.sleep(0.1)
        reads_itself = threading.current_thread().name in source.readers
        reader.close()
        return source.num_read, reads_itself

    assert run_together(run) == [(num_read, not prefetch)] * 2


@pytest.mark.parametrize("prefetch", [0, 1])
def test_a_position_is_that_of_what_was_used_however_far_was_read(prefetch):
    def run(peers: Any) -> list[Any]:
        source = Counted()
        dataset = make_dataset(peers, lambda: source, prefetch)
        feed = open_feed(dataset)
        seen: list[Any] = []

        def use(count: int) -> None:
            for _ in range(count):
                batch = next(feed.readers[0])
                feed.commit_taken()
                seen.append(int(batch.arrays[0, 0]))

        use(3)
        state = dataset.get_state()
        use(12)
        dataset.set_state(state)
        use(12)
        next(feed.readers[0])
        feed.seek(feed.positions)
        use(1)
        seen.append([part["source"] for part in dataset.get_state()["pipelines"]])
        feed.close()
        return seen

    expected = [*range(1, 16), *range(4, 17), [16, 16]]
    assert run_together(run) == [expected] * 2


@pytest.mark.parametrize("per_replica_batches", [True, False])
def test_an_error_in_the_middle_of_a_chunk_is_told_by_all(per_replica_batches):
    def run(peers: Any) -> None:
        def read_batches() -> Iterator[np.ndarray]:
            for number in range(30):
                if number == 17 and peers.index == 1:
                    raise OSError("the disk is on fire")
                yield np.full((2,), number)

        dataset = DistributedDataset(
            read_batches,
            ProcessLayout(peers, 1),
            per_replica_batches=per_replica_batches,
        )
        builder = ChunkBuilder([1], steps_per_chunk=7, gives_errors_at_once=True)
        with contextlib.closing(open_feed(dataset, name="`train_step`")) as feed:
            feed.start(builder.build, 1)
            read_chunks(feed)

    others, own = run_together(run)
    assert isinstance(own, OSError)
    assert isinstance(others, PeerError)
    assert "process 1 of 2: OSError: the disk is on fire" in str(others)
