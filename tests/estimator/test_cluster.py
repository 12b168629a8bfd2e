"""Estimators in several processes, started by the launcher, which sets `TF_CONFIG`."""

import json
import os
import subprocess
import sys

import pytest

from tests.environment import REPOSITORY
from tests.estimator import program
from tests.estimator.problems import make_strategy
from tests.patience import patience

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("has_evaluator", [False, True])
def test_two_processes_give_the_numbers_of_one(tmp_path, has_evaluator):
    options = ["--workers", "2", "--devices-per-worker", "1"]
    options += ["--evaluator"] * has_evaluator
    job = tmp_path / "job"
    job.mkdir()
    ended = subprocess.run(
        [
            *(sys.executable, "-m", "armillary", "launch", *options),
            *("-m", "tests.estimator.program", str(job), str(not has_evaluator)),
        ],
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        timeout=patience(240),
    )
    assert ended.returncode == 0, ended.stderr

    expected = program.run(tmp_path, make_strategy(2))
    results = {
        path.stem: json.loads(path.read_text()) for path in sorted(job.glob("*.json"))
    }
    assert expected["global_step"] == program.MAX_STEPS
    if has_evaluator:
        evaluated = results.pop("evaluator_0")
        assert results == {"worker_0": None, "worker_1": None}
    else:
        assert results.keys() == {"worker_0", "worker_1"}
        evaluated = results["worker_1"]
        assert evaluated == results["worker_0"]
    assert evaluated == pytest.approx(expected, rel=1e-5)
    assert {path.name for path in (job / "model").glob("checkpoint_*")} == {
        "checkpoint_4",
        "checkpoint_8",
    }
