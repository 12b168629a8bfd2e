"""Tests that each process reads only its own examples, in one order for all."""

import numpy as np
import pytest

import armillary
from tests.multiprocess import rows
from tests.multiprocess.conftest import run_on_eight_devices

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("processes", [2, 4])
def test_each_process_reads_the_examples_of_its_own_devices(tmp_path, processes):
    outcome = run_on_eight_devices(rows, tmp_path, "reads", processes)

    assert outcome.codes == [0] * processes, outcome.log
    for result in outcome.results:
        assert len(result) == len(rows.STRATEGIES) * len(rows.OPTIONS)
        for case, found in result.items():
            assert found["is_equal"], case
            assert found["reads"] == found["own"], case
            _, option = case.split(", ")
            num_batches = {"full batches": 5, "drop": 2}.get(option, 3)
            assert found["batches"] == num_batches, case
    # With examples divided over all devices, each is read in one process.
    num_read = [len(each["sharded, full batches"]["reads"]) for each in outcome.results]
    assert num_read == [5 * rows.BATCH_SIZE // processes] * processes


def test_examples_of_grain_are_read_by_number(tmp_path):
    strategy = armillary.MirroredStrategy()
    dataset = strategy.distribute_dataset(rows.make_grain(rows.Rows()))
    iterator = iter(dataset)
    for _ in range(3):
        next(iterator)
    outcome = run_on_eight_devices(
        rows, tmp_path, "reads_grain", 2, state=dataset.get_state()
    )

    assert outcome.codes == [0, 0], outcome.log
    for result in outcome.results:
        error = result.pop("error")
        assert error.startswith("PeerError: A dataset that is distributed over all")
        assert "shuffle seed: process 0 has [0], process 1 has [1]" in error
        for name, found in result.items():
            assert found["is_equal"], name
            assert found["reads"] == found["own"], name
            assert found["state"] == {
                **dataset.get_state(),
                "source": {"next_index": 8},
            }
    num_read = [len(result["sharded"]["reads"]) for result in outcome.results]
    assert num_read == [5 * rows.BATCH_SIZE // 2] * 2
    # One process continues what two have read.
    dataset.set_state(outcome.results[0]["sharded"]["state"])
    expected = rows.make_grain(rows.Rows())[8]
    batch = next(iterator)
    read = np.asarray(strategy.gather(batch["number"], axis=0))
    np.testing.assert_array_equal(read, expected["number"])


def test_an_example_that_one_process_cannot_read_stops_all(tmp_path):
    outcome = run_on_eight_devices(rows, tmp_path, "fails", 2)
    assert outcome.codes == [0, 0], outcome.log
    errors = sorted(outcome.results)
    assert errors[0] == f"OSError: example {rows.BAD} is gone"
    assert errors[1].startswith("PeerError: ")
    assert f"example {rows.BAD} is gone" in errors[1]
