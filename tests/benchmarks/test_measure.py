"""Tests of the parent process, which starts contestants and collects their figures."""

import os
import sys
from pathlib import Path

import pytest

from benchmarks.cases import Case, choose_cases
from benchmarks.measure import Settings, measure_case
from benchmarks.processes import REPOSITORY, WorkerError, WorkerProcess

FAKE = Path(__file__).with_name("fake_worker.py")
SETTINGS = Settings(rounds=3, seconds_per_burst=0.05, start_seconds=60.0)


def start_fake(seconds_per_step: float = 0.001, behavior: str = "run") -> WorkerProcess:
    command = [sys.executable, str(FAKE), str(seconds_per_step), behavior]
    return WorkerProcess("fake", command, {"PYTHONPATH": str(REPOSITORY)})


def measure(**fakes: tuple[float, str]) -> dict:
    (case,) = choose_cases(["mlp"], [10])
    names = {name.replace("_", "-"): fake for name, fake in fakes.items()}

    def start(name: str, case: Case, settings: Settings) -> WorkerProcess:
        return start_fake(*names[name])

    return measure_case(case, list(names), SETTINGS, start)


def test_peers_take_part_with_one_device_and_data_in_memory():
    cases = choose_cases(["mlp"], [1], [1, 2], ["memory", "grain"])
    assert [case.is_plain for case in cases] == [True, False, False, False]


@pytest.mark.slow
def test_figures_are_relative_to_the_faster_reference():
    entry = measure(
        reference_step=(0.004, "run"),
        reference_scan=(0.002, "run"),
        armillary=(0.004, "run"),
    )
    assert entry["reference"] == "reference-scan"
    records = entry["contestants"]
    assert records["reference-scan"]["ratio"] == {"median": 1, "low": 1, "high": 1}
    assert records["armillary"]["ratio"]["median"] == pytest.approx(0.5)
    assert entry["burst_steps"] % 10 == 0
    for record in records.values():
        assert len(record["seconds"]) == len(record["losses"]) == 3


@pytest.mark.slow
def test_a_contestant_that_fails_is_left_out_with_the_reason():
    entry = measure(
        reference_step=(0.001, "die"),
        reference_scan=(0.001, "run"),
        armillary=(0.001, "skip"),
        keras=(0.001, "error"),
    )
    assert list(entry["contestants"]) == ["reference-scan"]
    assert entry["skipped"] == {"armillary": "No luck."}
    assert entry["failed"]["keras"] == "No luck."
    assert "ended without an answer" in entry["failed"]["reference-step"]
    assert "Something broke." in entry["failed"]["reference-step"]


def test_a_worker_that_hangs_is_given_up_and_ended():
    # It would hang for longer than the whole run of the tests.
    with start_fake(0.0, "hang") as worker:
        worker.wait_ready(60.0)
        with pytest.raises(WorkerError, match="fake did not answer within 0 s"):
            worker.run(10, 0.2)
        worker.kill()
        with pytest.raises(ProcessLookupError):
            os.kill(worker.pid, 0)


def test_workers_end_with_the_block_also_when_it_is_interrupted():
    worker = start_fake()
    with pytest.raises(KeyboardInterrupt), worker:
        worker.wait_ready(60.0)
        raise KeyboardInterrupt
    with pytest.raises(ProcessLookupError):
        os.kill(worker.pid, 0)
