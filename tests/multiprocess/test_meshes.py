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
    run_dir = str(tmp_path / "run")
    shares = {"share": 0.6, "restore_share": 0.45}
    outcome = run(tmp_path, "limited", 4, size=2048, run_dir=run_dir, **shares)

    assert outcome.codes == [0] * 4, outcome.log
    first = outcome.results[0]
    assert all(each == first for each in outcome.results)
    assert first["part"] == [24, 256, 2048]
    assert np.isfinite(first["losses"]).all()
    assert first["restored"] == first["next"]
