"""Tests of SIGTERM to one process: all save the same step and exit."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from armillary.launch import ExitCode
from tests.environment import REPOSITORY
from tests.multiprocess import program
from tests.multiprocess.conftest import run_job
from tests.patience import patience
from tests.problems import make_strategy

pytestmark = pytest.mark.slow

STEPS = 60


def test_sigterm_to_one_process_saves_all_and_the_run_continues_bit_for_bit(
    tmp_path: Path,
):
    options = {"run_dir": str(tmp_path / "run"), "steps": STEPS}
    # The signal comes while a save is running, and comes again until all is over.
    first = run_job(
        tmp_path, "preempted", processes=2, devices=1, signal_at=3, **options
    )
    assert first.codes == [ExitCode.PREEMPTED] * 2, first.log
    chief, other = first.errors
    (step,) = re.findall(
        r"preempted: SIGTERM in process 1 of 2; saved .*/run/checkpoint_(\d+); ends "
        r"with exit code 77 \(PREEMPTED\)\.",
        chief,
    )
    assert 3 < int(step) < STEPS
    for text in (chief, other):
        assert "Traceback" not in text
        assert "PeerError" not in text
        assert "after the last loop" not in text
    names = {path.name for path in (tmp_path / "run").glob("checkpoint_*")}
    assert {"checkpoint_3", f"checkpoint_{step}"} <= names

    second = run_job(tmp_path, "preempted", processes=2, devices=1, **options)
    # They send themselves SIGTERM in the end, when nobody listens any more.
    assert second.codes == [-signal.SIGTERM] * 2, second.log
    alone = program.preempted(make_strategy(2), str(tmp_path / "alone"), STEPS)
    for result in second.results:
        assert result["start"] == int(step)
        assert result["state"] == alone["state"]


def test_sigterm_to_the_launcher_ends_the_job_with_77(tmp_path: Path):
    command = [sys.executable, "-m", "armillary", "launch", "--workers", "2"]
    command += ["--devices-per-worker", "1"]
    command += [str(REPOSITORY / "examples" / "multi_worker.py")]
    command += ["--run-dir", str(tmp_path), "--steps"]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    with subprocess.Popen(
        [*command, "1000000"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
    ) as launcher:
        assert launcher.stdout is not None
        try:
            for line in launcher.stdout:
                if "train | step:    100" in line:
                    launcher.send_signal(signal.SIGTERM)
                    break
            output, _ = launcher.communicate(timeout=patience(120))
        finally:
            launcher.kill()
    assert launcher.returncode == ExitCode.PREEMPTED, output
    (step,) = re.findall(r"saved .*/checkpoint_(\d+); ends with exit code 77", output)
    assert "ends with exit code 77 (PREEMPTED)." in output.splitlines()[-1]

    again = subprocess.run(
        [*command, str(int(step) + 100)],
        capture_output=True,
        text=True,
        timeout=patience(120),
        env=environment,
    )
    assert again.returncode == 0, again.stderr
    assert f"/checkpoint_{step}" in again.stderr
    assert f"train | step: {int(step) + 100:6d} | steps/sec" in again.stderr
