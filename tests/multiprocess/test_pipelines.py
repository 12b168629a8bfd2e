"""Tests of data of the processes' own under a mesh: each feeds its part of a batch."""

from typing import Any

import numpy as np
import pytest

from tests.multiprocess import pipelines
from tests.multiprocess.conftest import run_on_eight_devices

pytestmark = pytest.mark.slow


def find_batches(num_pipelines: int) -> np.ndarray:
    """Returns the batches to which each pipeline gives its next examples."""
    numbers = np.arange(pipelines.NUM_EXAMPLES).reshape(-1, num_pipelines)
    size = pipelines.BATCH_SIZE // num_pipelines
    return (
        numbers.T.reshape(num_pipelines, -1, size)
        .swapaxes(0, 1)
        .reshape(-1, pipelines.BATCH_SIZE)
    )


def test_each_process_feeds_its_part_of_a_batch(tmp_path):
    outcome = run_on_eight_devices(pipelines, tmp_path, "reads", 4)

    assert outcome.codes == [0] * 4, outcome.log
    # The pipelines of each mesh, and the pipeline of each process.
    plans = {
        "data": [0, 1, 2, 3],
        "data and tensor": [0, 1, 2, 3],
        "tensor over processes": [0, 0, 1, 1],
        "only tensor": [0, 0, 0, 0],
    }
    for process, result in enumerate(outcome.results):
        for name, numbers in plans.items():
            num_pipelines = max(numbers) + 1
            found = result[name]
            context = [num_pipelines, numbers[process], num_pipelines]
            assert found["context"] == context, name
            expected = find_batches(num_pipelines).tolist()
            for source in pipelines.SOURCES:
                assert found[source] == expected, (name, source)


def test_a_run_continues_with_as_many_pipelines(tmp_path):
    run_dir = str(tmp_path / "run")
    two_pipelines = pipelines.MESHES["tensor over processes"]
    expected = find_batches(2).tolist()
    for processes, steps in (4, 2), (2, 5):
        folder = tmp_path / f"job of {processes}"
        options: dict[str, Any] = {"steps": steps, "mesh": two_pipelines}
        outcome = run_on_eight_devices(
            pipelines,
            folder,
            "trains",
            processes,
            run_dir=run_dir,
            source="stream",
            **options,
        )
        assert outcome.codes == [0] * processes, outcome.log
        for result in outcome.results:
            assert result == {"seen": expected[:steps], "error": ""}

    outcome = run_on_eight_devices(
        pipelines,
        tmp_path / "other",
        "trains",
        4,
        run_dir=run_dir,
        steps=6,
        mesh={"data": 8},
        source="stream",
    )
    for result in outcome.results:
        assert (
            "the positions of 2 input pipelines, but the program has 4"
            in (result["error"])
        )
        assert "armillary.data.from_random_access(...)" in result["error"]


def test_an_evaluation_of_unequal_pipelines_needs_a_mask(tmp_path):
    outcome = run_on_eight_devices(pipelines, tmp_path, "evaluates", 4)

    assert outcome.codes == [0] * 4, outcome.log
    for result in outcome.results:
        assert result["pad"] == [60, sum(range(60))]
        # Three batches of 4 examples in each pipeline.
        first = [number for number in range(50) if number < 48]
        assert result["drop"] == [48, sum(first)]
        assert "BatchSizeError: In an evaluation, process" in result["unequal"]
        assert 'InputOptions(remainder="pad")' in result["unequal"]


def test_data_that_cannot_be_right_is_refused(tmp_path):
    outcome = run_on_eight_devices(pipelines, tmp_path, "mistakes", 4)

    assert outcome.codes == [0] * 4, outcome.log
    for result in outcome.results:
        assert (
            "PeerError: Processes 0 and 1 are one input pipeline"
            in (result["different"])
        )
        assert "`input_pipeline_id`" in result["different"]
        assert (
            "BatchSizeError: A batch of this input pipeline has 3 examples"
            in (result["odd"])
        )
        assert "(3 % 2 = 1)" in result["odd"]
        overlapping = result["overlapping"]
        assert "ValueError: The function with an `input_context`" in overlapping
        assert "process 0: 0, 1\n  process 1: 1, 2" in overlapping
        assert "strategy.distribute_dataset(dataset)" in overlapping


@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_generator_that_fails_in_one_process_ends_all(tmp_path, prefetch):
    outcome = run_on_eight_devices(pipelines, tmp_path, "fails", 4, prefetch=prefetch)

    assert outcome.codes == [0] * 4, outcome.log
    for process, result in enumerate(outcome.results):
        if process == 1:
            assert result["error"] == "OSError: the disk is gone"
        else:
            assert "process 1 of 4: OSError: the disk is gone" in result["error"]


@pytest.mark.parametrize(
    ("mesh", "num_pipelines"), [("data", 4), ("tensor over processes", 2)]
)
def test_each_pipeline_has_a_mixture_of_its_own(tmp_path, mesh, num_pipelines):
    options: dict[str, Any] = {"mesh": pipelines.MESHES[mesh]}
    outcome = run_on_eight_devices(pipelines, tmp_path, "mixes", 4, **options)

    assert outcome.codes == [0] * 4, outcome.log
    # Three batches with equal shares, and two with a quarter and three quarters.
    size = pipelines.BATCH_SIZE // num_pipelines
    used = {"a": 3 * size // 2 + 2 * size // 4, "b": 3 * size // 2 + 2 * 3 * size // 4}
    for result in outcome.results:
        assert result["used"] == [used] * num_pipelines
        assert result["rest"] == result["again"] == outcome.results[0]["rest"]
