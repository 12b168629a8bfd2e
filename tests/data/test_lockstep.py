"""Tests that processes with separate data agree on one sequence of batches."""

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
from tests.patience import wait_until
from tests.peers import run_together


class ProcessLayout:
    """Some replicas in each process; arrays stay on the host."""

    stacked = True

    def __init__(self, peers: Any, num_own: int) -> None:
        self.peers = peers
        self.pipelines = tuple((index,) for index in range(peers.count))
        self.place = lambda arrays, *_: arrays
        self.num_replicas = peers.count * num_own
        self.local_replicas = range(peers.index * num_own, (peers.index + 1) * num_own)


def read(
    make_batches: Callable[[int], list[Any]],
    *,
    in_pieces: bool,
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
            (batch.arrays.shape[1], batch.active, batch.arrays.tolist())
            for batch in open_reader(dataset, in_pieces=in_pieces)
        ]

    return run_together(read_one, count)


def batches_of(*sizes: int, start: int = 0) -> list[np.ndarray]:
    return [np.full(size, start + i) for i, size in enumerate(sizes)]


@pytest.mark.parametrize("prefetch", [0, 1])
@pytest.mark.parametrize("lengths", [(50, 45), (40, 20), (11, 11), (1, 39)])
def test_evaluation_uses_every_batch_of_every_process(lengths, prefetch):
    outcomes = read(
        lambda i: batches_of(*[4] * (lengths[i] - 1), 3, start=100 * i),
        in_pieces=True,
        prefetch=prefetch,
    )
    plans = [[batch[:2] for batch in outcome] for outcome in outcomes]
    assert plans[0] == plans[1]
    for index, outcome in enumerate(outcomes):
        used = [
            row for size, active, (rows,) in outcome if index in active for row in rows
        ]
        expected = batches_of(*[4] * (lengths[index] - 1), 3, start=100 * index)
        assert used == np.concatenate(expected).tolist()


# By what they show: the sizes of the batches of each process, whether a pass is
# `in_pieces`, replicas of a process, and the steps: their size and who has data.
PLANS = {
    "the shortest ends training": ([(4,) * 3, (4,) * 2], False, 1, [(4, (0, 1))] * 2),
    "large ones first": (
        [(4, 4), (4, 2)],
        True,
        1,
        [(4, (0, 1)), (4, (0,)), (2, (1,))],
    ),
    "the first process has more": (
        [(4, 4, 4), (4, 4)],
        True,
        2,
        [(4, (0, 1, 2, 3)), (4, (0,))],
    ),
    "the second process has more": (
        [(4, 4), (4, 4, 4)],
        True,
        2,
        [(4, (0, 1, 2, 3)), (4, (2,))],
    ),
    "no example": ([(), ()], True, 1, []),
}
for count in (19, 20, 21, 40):
    plan = [(4, (0,))] * count + [(2, (1,))]
    PLANS[f"{count} steps until its turn"] = ([(4,) * count, (2,)], True, 1, plan)


@pytest.mark.parametrize("kind", PLANS)
def test_processes_come_to_one_sequence_of_steps(kind):
    sizes, in_pieces, num_own, expected = PLANS[kind]
    outcomes = read(
        lambda i: batches_of(*sizes[i]), in_pieces=in_pieces, num_own=num_own
    )
    for outcome in outcomes:
        assert [batch[:2] for batch in outcome] == expected


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (
            lambda i: batches_of(4 - i),
            {"in_pieces": False},
            "batches of the processes dif",
        ),
        (
            lambda i: batches_of(4, 3),
            {"in_pieces": False, "num_own": 2},
            "2 replicas take one batch each",
        ),
        (
            lambda i: [np.zeros((4, 3 - i))],
            {"in_pieces": True},
            r"process 0: .*float.* \(1, 4, 3\)",
        ),
        (
            lambda i: [] if i else batches_of(4),
            {"in_pieces": True},
            "Process 1 of 2 has no example",
        ),
    ],
    ids=["sizes", "sizes in a process", "structure", "no example"],
)
def test_batches_that_do_not_go_together_are_shown_by_all(make, options, message):
    for outcome in read(make, **options):
        with pytest.raises(BatchSizeError, match=message):
            raise outcome


def test_uneven_batches_of_data_of_its_own_are_for_evaluation_alone():
    message = '`remainder` is "exact", but each process reads its own data'
    for outcome in read(lambda i: batches_of(4, 3), in_pieces=False, remainder="exact"):
        with pytest.raises(ValueError, match=message):
            raise outcome
    evaluation = read(lambda i: batches_of(4, 3), in_pieces=True, remainder="exact")
    assert [batch[:2] for batch in evaluation[0]] == [(4, (0, 1)), (3, (0, 1))]


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
        wait_until(lambda: source.num_read >= num_read)
        time.sleep(0.1)
        reads_itself = threading.current_thread().name in source.readers
        reader.close()
        return source.num_read, reads_itself

    assert run_together(run) == [(num_read, not prefetch)] * 2


@pytest.mark.parametrize("prefetch", [0, 1])
def test_processes_agree_on_each_batch_that_is_not_read_ahead(prefetch):
    def run(peers: Any) -> list[int]:
        source = Counted()
        dataset = make_dataset(peers, lambda: source, prefetch)
        reader = open_reader(dataset, reads_ahead=False)
        counts = []
        for _ in range(3):
            next(reader)
            counts.append(source.num_read)
        reader.close()
        return counts

    assert run_together(run) == [[1, 2, 3]] * 2


@pytest.mark.parametrize("prefetch", [0, 1])
def test_a_position_counts_used_batches_however_far_was_read(prefetch):
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
def test_an_error_in_the_middle_of_a_chunk_is_reported_by_all(per_replica_batches):
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
