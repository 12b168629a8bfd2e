"""Tests of input pipelines that feed parts of one replica's batch."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest

from armillary.cluster._peers import ALONE
from armillary.data import DistributedDataset, InputOptions, from_arrays
from armillary.data._layout import Pipelines, find_pipeline
from armillary.errors import BatchSizeError, DatasetStateError, PeerError
from tests.feeds import open_reader
from tests.peers import run_together

EACH_ALONE: Pipelines = ((0,), (1,))
IN_PAIRS: Pipelines = ((0, 1), (2, 3))


class PipelineLayout:
    """One replica over several processes; arrays stay on the host."""

    stacked = False
    num_replicas = 1
    local_replicas = range(1)

    def __init__(self, peers: Any, pipelines: Pipelines, num_parts: int = 1) -> None:
        self.peers = peers
        self.pipelines = pipelines
        self.num_shares = num_parts * len(pipelines)
        self.place = lambda arrays, *_: arrays


def read(
    make: Callable[[int], Any],
    pipelines: Pipelines,
    *,
    in_pieces: bool = False,
    num_parts: int = 1,
    **options: Any,
) -> list[Any]:
    """Returns the batches of each process, for datasets of their pipelines."""

    def read_one(peers: Any) -> list[Any]:
        layout = PipelineLayout(peers, pipelines, num_parts)
        dataset = DistributedDataset(
            make(find_pipeline(layout)),
            layout,
            per_replica_batches=True,
            options=InputOptions(**options),
        )
        return [
            (jax.tree.map(np.ndarray.tolist, batch.arrays), batch.active)
            for batch in open_reader(dataset, in_pieces=in_pieces)
        ]

    return run_together(read_one, sum(map(len, pipelines)))


def batches_of(*sizes: int, start: int = 0) -> list[Any]:
    return [{"x": np.full(size, start + i)} for i, size in enumerate(sizes)]


@pytest.mark.parametrize("prefetch", [0, 2])
def test_training_ends_with_the_shortest_pipeline(prefetch):
    outcomes = read(
        lambda pipeline: batches_of(*[4] * (12 + pipeline), start=100 * pipeline),
        IN_PAIRS,
        prefetch=prefetch,
    )
    for process, outcome in enumerate(outcomes):
        start = 100 * (process // 2)
        assert outcome == [({"x": [start + i] * 4}, (0,)) for i in range(12)]


def test_an_evaluation_hides_the_rows_of_pipelines_without_data():
    outcomes = read(
        lambda pipeline: batches_of(*[4] * pipeline, 3, start=100 * pipeline),
        EACH_ALONE,
        in_pieces=True,
        num_parts=2,
        remainder="pad",
    )
    masks = [[batch["mask"] for batch, _ in outcome] for outcome in outcomes]
    # Three rows are filled up to two equal parts.
    assert masks[0] == [[True] * 3 + [False], [False] * 4]
    assert masks[1] == [[True] * 4, [True] * 3 + [False]]
    values = [batch["x"] for batch, _ in outcomes[1]]
    assert values == [[100] * 4, [101] * 4]


def test_an_evaluation_can_leave_out_unequal_batches():
    outcomes = read(
        lambda pipeline: batches_of(4, *[4] * pipeline, 3),
        EACH_ALONE,
        in_pieces=True,
        remainder="drop",
    )
    assert [len(outcome) for outcome in outcomes] == [1, 1]


@pytest.mark.parametrize("sizes", [((4, 4), (4,)), ((4, 3), (4, 2))])
def test_an_evaluation_of_unequal_batches_needs_an_option(sizes):
    message = r'has none of this size.*InputOptions\(remainder="pad"\).*`mask`'
    outcomes = read(
        lambda pipeline: batches_of(*sizes[pipeline]), EACH_ALONE, in_pieces=True
    )
    for outcome in outcomes:
        with pytest.raises(BatchSizeError, match=message):
            raise outcome


def test_a_batch_must_divide_into_the_parts_of_its_devices():
    message = r"has 6 examples, but its devices divide it into 4 parts \(6 % 4 = 2\)"
    for outcome in read(lambda _: batches_of(6), EACH_ALONE, num_parts=4):
        with pytest.raises(BatchSizeError, match=message):
            raise outcome


def test_arrays_of_a_pipeline_do_not_stay_on_devices():
    def make(pipeline: int) -> Any:
        return from_arrays({"x": np.arange(4) + pipeline}, batch_size=2)

    for outcome in read(make, EACH_ALONE, place_on_device=True):
        with pytest.raises(ValueError, match=r"`place_on_device`.*`input_context`.*Le"):
            raise outcome


@pytest.mark.parametrize("difference", ["values", "number", "size"])
def test_processes_of_one_pipeline_must_have_the_same_batches(difference):
    made = iter([0, 1, 0, 0])

    def make(pipeline: int) -> Any:
        del pipeline
        other = next(made)
        if difference == "values":
            return batches_of(4, start=other)
        return (
            batches_of(*[4] * (2 - other))
            if difference == "number"
            else (batches_of(4 - other))
        )

    message = r"(?s)are one input pipeline.*\d+ batches, checksum.*`input_pipeline_id`"
    for outcome in read(make, IN_PAIRS):
        with pytest.raises(PeerError, match=message):
            raise outcome


def make_dataset(peers: Any, pipelines: Pipelines) -> DistributedDataset:
    layout = PipelineLayout(peers, pipelines)
    rows = np.arange(10) + 100 * find_pipeline(layout)
    source = from_arrays({"x": rows}, batch_size=2)
    return DistributedDataset(source, layout, per_replica_batches=True)


def test_a_position_continues_with_as_many_pipelines():
    def save(peers: Any) -> Any:
        dataset = make_dataset(peers, IN_PAIRS)
        reader = open_reader(dataset)
        next(reader)
        reader.used = reader.position
        return dataset.get_state()

    states = run_together(save, 4)
    assert states == [states[0]] * 4
    assert len(states[0]["pipelines"]) == 2

    def restore(peers: Any) -> Any:
        dataset = make_dataset(peers, EACH_ALONE)
        dataset.set_state(states[0])
        reader = open_reader(dataset)
        batch = next(reader)
        return reader.data.gather.on_host(batch.arrays)["x"].tolist()

    assert run_together(restore, 2) == [[2, 3], [102, 103]]

    def refuse(peers: Any) -> None:
        make_dataset(peers, ((0,), (1,), (2,))).set_state(states[0])

    message = (
        "positions of 2 input pipelines, but the program has 3.*"
        r"from_random_access\(\.\.\.\).*continues on any number.*leave the dataset out"
    )
    for outcome in run_together(refuse, 3):
        with pytest.raises(DatasetStateError, match=message):
            raise outcome


def read_next(peers: Any, pipelines: Pipelines, state: Any) -> list[int]:
    dataset = make_dataset(peers, pipelines)
    dataset.set_state(state)
    reader = dataset.open_reader(in_pieces=False, begins_anew=True)
    return reader.data.gather.on_host(next(reader).arrays)["x"].tolist()


def test_the_position_of_one_pipeline_continues_on_any_number_of_processes():
    together: Pipelines = ((0, 1),)

    def save(peers: Any) -> Any:
        dataset = make_dataset(peers, ((0,),) if peers is ALONE else together)
        reader = open_reader(dataset)
        next(reader)
        reader.used = reader.position
        return dataset.get_state()

    alone = save(ALONE)
    states = run_together(save, 2)
    assert "pipelines" not in alone
    assert "pipelines" in states[0]

    on_two = run_together(lambda peers: read_next(peers, together, alone), 2)
    assert on_two == [[2, 3]] * 2
    assert read_next(ALONE, ((0,),), states[0]) == [2, 3]


def test_another_number_of_pipelines_continues_between_two_passes():
    def save(peers: Any) -> Any:
        dataset = make_dataset(peers, EACH_ALONE)
        reader = open_reader(dataset)
        for _ in reader:
            reader.used = reader.position
        reader.used = replace(reader.used, is_exhausted=True)
        return dataset.get_state()

    state, _ = run_together(save, 2)
    assert len(state["pipelines"]) == 2

    apart: Pipelines = ((0,), (1,), (2,))
    on_three = run_together(lambda peers: read_next(peers, apart, state), 3)
    assert on_three == [[0, 1], [100, 101], [200, 201]]
    assert read_next(ALONE, ((0,),), state) == [0, 1]
