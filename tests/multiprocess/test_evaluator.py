"""Tests of an evaluator next to two workers, with real processes."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from etils import epath
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from armillary.actions import NewBestMetric
from armillary.checkpoint._best import read_best
from tests.environment import REPOSITORY
from tests.multiprocess import roles
from tests.patience import patience
from tests.problems import make_strategy

pytestmark = pytest.mark.slow

STEPS = 18


def test_every_checkpoint_of_a_job_is_evaluated_once_across_a_restart(tmp_path):
    result = launch(tmp_path, die_at=9)

    assert result.returncode == 0, result.stderr
    assert "worker 1 of 2 failed first: killed by SIGKILL" in result.stderr
    assert result.stderr.count("[launcher] starts 2 workers") == 2
    assert result.stderr.count("[launcher] starts the evaluator.") == 1
    saved = range(3, STEPS + 1, 3)
    pattern = r"(?m)^\[(\S+?)(?: \d)?\] +eval \| step: +(\d+) \| eval time"
    evaluated = re.findall(pattern, result.stderr)
    assert evaluated == [("evaluator", str(step)) for step in saved]
    assert "[evaluator] train |" not in result.stderr

    # The numbers equal the numbers of a process that trains and evaluates in turns.
    alone = roles.make_controller(make_strategy(2), tmp_path / "alone")
    alone.train_and_evaluate(STEPS, eval_interval=3)
    expected = read_accuracies(tmp_path / "alone" / "eval")
    assert expected.keys() == set(saved)
    assert read_accuracies(tmp_path / "run" / "eval") == expected
    best = NewBestMetric("accuracy", higher_is_better=True, directory=tmp_path / "run")
    assert best.best_value == pytest.approx(max(expected.values()))
    # If values are equal, the first counts: `max` takes that one.
    step = max(expected, key=lambda step: expected[step])
    for folder in ("run", "alone"):
        found = read_best(epath.Path(tmp_path / folder / "checkpoints"))
        assert found is not None and found.saved.number == step
    # The evaluator alone writes what belongs to evaluations, the chief all else.
    assert len(list((tmp_path / "run" / "eval").glob("events*"))) == 1
    tags = EventAccumulator(str(tmp_path / "run" / "train")).Reload().Tags()["scalars"]
    speeds = {"steps_per_second", "examples_per_second"}
    assert set(tags) == {"accuracy", *speeds, "tflops_per_second_per_device"}


def launch(folder: Path, *, die_at: int) -> subprocess.CompletedProcess[str]:
    options = "--workers 2 --devices-per-worker 1 --evaluator --max-restarts 1"
    options += " --pause-seconds 0 --grace-seconds 2"
    return subprocess.run(
        [
            *(sys.executable, "-m", "armillary", "launch", *options.split()),
            roles.__file__,
            *(str(folder / "run"), str(STEPS), str(die_at)),
        ],
        capture_output=True,
        text=True,
        timeout=patience(240),
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
    )


def read_accuracies(folder: Path) -> dict[int, float]:
    events = EventAccumulator(str(folder)).Reload().Scalars("accuracy")
    return {event.step: event.value for event in events}
