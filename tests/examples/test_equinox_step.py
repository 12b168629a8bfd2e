"""The pure step with an Equinox model learns, and continues where it was stopped."""

import re

import pytest

from tests.examples.running import read_accuracy, read_steps, run_well


def run(run_dir, steps):
    arguments = ("--devices", 2, "--steps-per-loop", 100, "--steps", steps)
    return run_well("equinox_step.py", "--run-dir", run_dir, *arguments)


@pytest.mark.slow
def test_a_stopped_run_continues_and_equals_one_that_was_not_stopped(tmp_path):
    run(tmp_path / "stopped", 100)
    resumed = run(tmp_path / "stopped", 300)
    straight = run(tmp_path / "straight", 300)

    assert read_steps(resumed.stderr) == [200, 300]
    pattern = r"train \| step: +300 .* output: (.*)"
    assert re.findall(pattern, resumed.stderr) == re.findall(pattern, straight.stderr)
    assert read_accuracy(resumed.stdout) == read_accuracy(straight.stdout) > 85.0
