"""Runs an example in a process, as a reader runs it."""

import re
import subprocess
import sys

from tests.environment import forget_devices
from tests.examples.loading import EXAMPLES
from tests.patience import patience


def run_example(name: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    environment = {**forget_devices(), "PYTHONPATH": str(EXAMPLES.parent)}
    if "keras" in name:  # Its layers rely on the promotion of ranks.
        environment["JAX_NUMPY_RANK_PROMOTION"] = "allow"
    return subprocess.run(
        [sys.executable, str(EXAMPLES / name), *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=patience(240),
        env=environment,
    )


def run_well(name: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    result = run_example(name, *arguments)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "Traceback" not in result.stderr
    return result


def read_accuracy(output: str) -> float:
    match = re.search(r"Test accuracy (\d+\.\d+)%", output)
    assert match is not None, output
    return float(match[1])


def read_steps(log: str) -> list[int]:
    """Returns the steps whose loops the log reports."""
    return [
        int(step) for step in re.findall(r"train \| step: +(\d+) \| steps/sec", log)
    ]
