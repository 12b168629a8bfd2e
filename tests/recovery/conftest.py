"""Jobs under `armillary launch` that a test kills parts of."""

import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import REPOSITORY, forget_devices
from tests.launch.conftest import Launcher, wait_for

DEADLINE = 240.0

SCRIPT = """
import pathlib
import armillary
from tests.checkpoint.soak_program import train

num_steps, saves_never_end_in = int(sys.argv[1]), int(sys.argv[2])
rename = os.rename

def hold(source, target):
    if "orbax-checkpoint-tmp" in str(source):
        mark("saving")
        time.sleep(300)
    rename(source, target)

if index == 0 and restarts == saves_never_end_in:
    os.rename = os.replace = hold

def report(step):
    mark(f"step_{index}_{restarts}", step)
    with open(f"steps_{index}_{restarts}", "a") as file:
        file.write(f"{step} ")
    time.sleep(0.1)  # So that the test is in time.

strategy = armillary.MultiWorkerMirroredStrategy()
final = train(strategy, pathlib.Path("run"), num_steps, report)
mark(f"final_{index}", json.dumps(final))
"""


class Job:
    """A training of some workers, which starts again when one of them dies."""

    def __init__(self, folder: Path, workers: int) -> None:
        folder.mkdir()
        self.folder, self.workers = folder, workers
        self.launcher = Launcher(folder)

    def start(self, num_steps: int, saves_never_end_in: int = -1) -> "Job":
        """Starts it.

        Args:
            num_steps: The step to train up to.
            saves_never_end_in: The attempt in which the chief never completes a save.
        """
        self.launcher.start(
            SCRIPT,
            f"--workers {self.workers} --max-restarts 2 --restart-pause 0.1 "
            "--grace-period 5",
            args=[str(num_steps), str(saves_never_end_in)],
            PYTHONPATH=str(REPOSITORY),
            XLA_FLAGS=forget_devices()["XLA_FLAGS"],
        )
        return self

    def wait_for_step(self, step: int, worker: int, attempt: int) -> None:
        path = self.folder / f"step_{worker}_{attempt}"
        wait_for(
            lambda: path.exists() and int(path.read_text()) >= step,
            f"step {step} of worker {worker}, attempt {attempt}",
            DEADLINE,
        )

    def kill(self, worker: int, attempt: int) -> None:
        pid = int(self.launcher.wait_for_mark(f"pid_{worker}_{attempt}", DEADLINE))
        os.kill(pid, signal.SIGKILL)

    def steps(self, worker: int, attempt: int) -> list[int]:
        """Returns the global steps at which an attempt began and ended its loops."""
        text = (self.folder / f"steps_{worker}_{attempt}").read_text()
        return [int(step) for step in text.split()]

    def finish(self) -> tuple[list[Any], str]:
        """Returns the final state of each worker, and what the launcher said."""
        stdout, stderr = self.launcher.process.communicate(timeout=DEADLINE)
        assert self.launcher.process.returncode == 0, stdout + stderr
        paths = [self.folder / f"final_{i}" for i in range(self.workers)]
        lines = [line for line in stderr.splitlines() if line.startswith("[launcher]")]
        return [json.loads(path.read_text()) for path in paths], "\n".join(lines)


@pytest.fixture
def make_job(tmp_path: Path) -> Iterator[Callable[..., Job]]:
    """Returns a function that makes jobs, none of which outlives the test."""
    jobs: list[Job] = []

    def make(name: str, workers: int) -> Job:
        jobs.append(Job(tmp_path / name, workers))
        return jobs[-1]

    yield make
    left = [pid for job in jobs for pid in job.launcher.find_running()]
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    for job in jobs:
        if job.launcher._process is not None:
            job.launcher.process.communicate(timeout=DEADLINE)
    assert not left, "A process outlived the test."
