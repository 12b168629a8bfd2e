"""Tests that several processes train on a user's mesh as one device does."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import armillary
from tests.multiprocess import meshes
from tests.multiprocess.conftest import Outcome, run_program

pytestmark = pytest.mark.slow


def run(folder: Path, scenario: str, processes: int, **options: Any) -> Outcome:
    program = Path(meshes.__file__)
    return run_program(program, folder, scenario, processes, 2, **options)


@pytest.mark.parametrize("processes", [2, 4])
def test_a_mesh_of_all_processes_gives_the_numbers_of_one_device(tmp_path, processes):
    alone = meshes.follow(armillary.OneDeviceStrategy("cpu:0"), None)

    outcome = run(tmp_path, "meshes", processes)

    assert outcome.codes == [0] * processes, outcome.log
    first = outcome.results[0]
    assert all(each == first for each in outcome.results)
    for name in ("own", "slow"):
        np.testing.assert_allclose(first[name]["losses"], alone["losses"], rtol=1e-5)
        assert first[name]["sum"] == pytest.approx(alone["sum"], rel=1e-5)
    assert first["own"]["spec"] == [None, None, "model"]
    assert first["slow"]["spec"] == [None, "fsdp", None]
    # `fsdp` stays within a process, and `data` spans all of them.
    assert first["processes"] == [[index, index] for index in range(processes)]


def test_a_state_larger_than_the_memory_of_a_process_is_trained_and_resumed(tmp_path):
    first, second = [run_limited(tmp_path, number) for number in range(2)]

    assert first["part"] == [24, 256, 2048]
    assert np.isfinite(first["losses"]).all()
    assert second["losses"] == first["later"]


def run_limited(tmp_path, number):
    """Runs a job of four processes that hold at most 60 % of the state each."""
    folder = tmp_path / str(number)
    run_dir = str(tmp_path / "run")
    outcome = run(folder, "limited", 4, size=2048, share=0.6, run_dir=run_dir)

    assert outcome.codes == [0] * 4, outcome.log
    # Old and new arrays of a process would need more, so the second job has parts.
    assert ("so the restore has" in outcome.log) == (number == 1)
    result, *others = outcome.results
    assert all(each == result for each in others)
    return result
