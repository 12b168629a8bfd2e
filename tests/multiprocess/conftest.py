"""Starts a job of several real processes on loopback, and ends it in any case."""

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from armillary.launch._environment import DevicePlan, make_environment
from tests.conftest import REPOSITORY

DEADLINE = 120.0


class Outcome(NamedTuple):
    """How a job ended: for each process its exit code, its result and its stderr."""

    codes: list[int]
    results: list[Any]
    errors: list[str]


def run_job(
    folder: Path, scenario: str, *, processes: int, devices: int, **options: Any
) -> Outcome:
    """Runs a function of `program.py` in some processes with some devices each."""
    folder.mkdir(parents=True, exist_ok=True)
    addresses = [f"127.0.0.1:{find_port()}" for _ in range(processes)]
    running, logs = [], []
    for index in range(processes):
        log = (folder / f"stderr_{index}").open("w+")
        logs.append(log)
        environment = make_environment(
            {**os.environ, "PYTHONPATH": str(REPOSITORY)},
            addresses=addresses,
            index=index,
            devices=DevicePlan(virtual_cpus=devices),
            num_restarts=0,
        )
        result = folder / f"result_{index}.json"
        result.unlink(missing_ok=True)
        program = Path(__file__).with_name("program.py")
        arguments = [str(program), scenario, str(result), json.dumps(options)]
        running.append(
            subprocess.Popen(
                [sys.executable, *arguments],
                env=environment,
                stdout=log,
                stderr=log,
                cwd=folder,
            )
        )
    end = time.monotonic() + DEADLINE
    try:
        for process in running:
            process.wait(max(0.0, end - time.monotonic()))
    except subprocess.TimeoutExpired:
        pass
    finally:
        for process in running:
            process.kill()
            process.wait()
    errors = []
    for log in logs:
        log.seek(0)
        errors.append(log.read())
        log.close()
    results = [
        json.loads(path.read_text()) if path.exists() else None
        for path in (folder / f"result_{index}.json" for index in range(processes))
    ]
    return Outcome([process.returncode for process in running], results, errors)


def find_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture
def job(tmp_path: Path) -> Callable[..., list[Any]]:
    """Returns a function that runs a scenario and returns each process's result."""

    def run(scenario: str, **options: Any) -> list[Any]:
        outcome = run_job(tmp_path, scenario, **options)
        shown = "\n".join(text[-4000:] for text in outcome.errors)
        assert outcome.codes == [0] * len(outcome.codes), shown
        return outcome.results

    return run
