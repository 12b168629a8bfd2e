"""Tests of steps without data, and of Python state, in two real processes."""

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import armillary
from tests.multiprocess import without_data
from tests.multiprocess.conftest import DEADLINE, Job

pytestmark = pytest.mark.slow


def run(folder: Path, **options: Any) -> list[Any]:
    program = Path(without_data.__file__)
    job = Job(folder, program, "train", 2, devices=2, **options)
    try:
        codes = job.wait(DEADLINE)
    finally:
        job.end()
    assert codes == [0, 0], [job.output(index) for index in range(2)]
    return [json.loads((folder / f"result_{i}.json").read_text()) for i in range(2)]


def test_two_processes_train_as_one_and_resume(tmp_path):
    run_dir = str(tmp_path / "run")
    run(tmp_path / "first", run_dir=run_dir, steps=6)
    first, second = run(tmp_path / "second", run_dir=run_dir, steps=14)
    assert first == second

    strategy = armillary.MirroredStrategy(jax.devices()[:4])
    alone_dir = str(tmp_path / "alone")
    without_data.train(strategy, alone_dir, 6)
    alone = without_data.train(strategy, alone_dir, 14)
    np.testing.assert_allclose(first["w"], alone["w"], rtol=1e-5)
    assert first["sum"] == pytest.approx(alone["sum"], rel=1e-5)
    assert first["counts"] == alone["counts"]


def test_python_state_that_differs_between_processes_is_refused(tmp_path):
    run_dir = str(tmp_path / "run")
    for found in run(tmp_path / "job", run_dir=run_dir, steps=4, own_seeds=True):
        assert "has another state in process 1 than in process 0" in found["error"]
