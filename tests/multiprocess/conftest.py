"""Starts jobs of several real processes on loopback, and always ends them."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

from armillary.launch._environment import DevicePlan, find_addresses, make_environment
from tests.environment import REPOSITORY
from tests.patience import patience

DEADLINE = 180.0


class Job:
    """Processes that run a function of a program, with some devices each.

    The program gets the name of the function, a file for its result, and options.
    """

    def __init__(
        self,
        folder: Path,
        program: Path,
        scenario: str,
        count: int,
        devices: int = 1,
        **options: Any,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self._program = folder, program
        self._scenario, self._options = scenario, json.dumps(options)
        self._addresses, self._devices = find_addresses(count), devices
        self.processes: list[subprocess.Popen[bytes]] = []
        for index in range(count):
            self.start(index)

    def start(self, index: int) -> None:
        """Starts a process, or one more in its place."""
        environment = make_environment(
            {**os.environ, "PYTHONPATH": str(REPOSITORY)},
            addresses=self._addresses,
            index=index,
            devices=DevicePlan(virtual_cpus=self._devices),
            num_restarts=0,
        )
        result = self.folder / f"result_{index}.json"
        result.unlink(missing_ok=True)
        arguments = [str(self._program), self._scenario, str(result), self._options]
        with (self.folder / f"output_{len(self.processes)}").open("w") as output:
            process = subprocess.Popen(
                [sys.executable, *arguments],
                env=environment,
                stdout=output,
                stderr=output,
                cwd=self.folder,
            )
        self.processes.append(process)

    def output(self, index: int) -> str:
        return (self.folder / f"output_{index}").read_text()

    def wait(self, seconds: float, *indices: int) -> list[int | None]:
        """Returns the exit codes of some processes, or of all; `None` if one runs.

        `seconds` is a limit on an idle machine.
        """
        end = time.monotonic() + patience(seconds)
        chosen = [self.processes[i] for i in indices or range(len(self.processes))]
        while any(p.poll() is None for p in chosen) and time.monotonic() < end:
            time.sleep(0.05)
        return [process.poll() for process in chosen]

    def end(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()


class Outcome(NamedTuple):
    """The end of a job: the exit code, result and output of each process."""

    codes: list[int]
    results: list[Any]
    errors: list[str]

    @property
    def log(self) -> str:
        """All output, for the message of a failed test."""
        return "\n".join(self.errors)


def run_job(
    folder: Path, scenario: str, *, processes: int, devices: int, **options: Any
) -> Outcome:
    """Runs a function of `program.py` in some processes with some devices each."""
    program = Path(__file__).with_name("program.py")
    return run_program(program, folder, scenario, processes, devices, **options)


def run_program(
    program: Path,
    folder: Path,
    scenario: str,
    processes: int,
    devices: int,
    *,
    seconds: float = DEADLINE,
    **options: Any,
) -> Outcome:
    """Runs a function of a program, and waits until all processes have ended."""
    job = Job(folder, program, scenario, processes, devices, **options)
    try:
        job.wait(seconds)
    finally:
        job.end()
    return read_outcome(job)


def run_on_eight_devices(
    program: Any, folder: Path, scenario: str, processes: int, **options: Any
) -> Outcome:
    """Runs a function of a program in processes that have eight devices together."""
    file = Path(program.__file__)
    return run_program(file, folder, scenario, processes, 8 // processes, **options)


def read_outcome(job: Job) -> Outcome:
    """Returns the end of a job whose processes have ended."""
    processes = len(job.processes)
    paths = [job.folder / f"result_{index}.json" for index in range(processes)]
    return Outcome(
        [process.returncode for process in job.processes],
        [json.loads(p.read_text()) if p.exists() else None for p in paths],
        [job.output(index) for index in range(processes)],
    )
