"""Runs each further measurement of `make bench` once, at tiny sizes."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import checkpoint_cost, host_work, memory, sources, start_time
from benchmarks.cases import Case
from benchmarks.measure import Settings
from benchmarks.processes import REPOSITORY, WorkerProcess
from benchmarks.tasks import make_task
from tests.patience import patience


@pytest.mark.slow
@pytest.mark.parametrize(("optimizer", "num_arrays"), [("sgd", 13), ("adam", 34)])
def test_host_work_sees_one_program_for_each_loop(optimizer, num_arrays):
    measurement = host_work.measure(20, "small", optimizer)
    assert measurement["loops"] == 20
    assert measurement["parameters"] == 10
    assert measurement["arrays"] == num_arrays
    low, high = measurement["armillary_quartiles_us"]
    assert 0 < low <= measurement["armillary_us"] <= high
    assert measurement["start_us"] > 0
    assert measurement["yours_us"] > 0
    assert measurement["handling_us"] > 0


@pytest.mark.slow
def test_every_source_that_is_installed_gives_all_rows():
    measurement = sources.measure(300, 2)
    found = measurement["sources"]
    assert {"arrays", "TFRecord files", "grain.MapDataset"} <= set(found)
    assert found["arrays"]["ratio"] == 1
    for each in found.values():
        low, high = each["ratio_quartiles"]
        assert 0 < low <= each["ratio"] <= high


@pytest.mark.slow
@pytest.mark.parametrize("task", ["mlp", "many-leaves", "bert"])
def test_the_loop_needs_no_more_memory_than_a_scan_and_one_chunk(task):
    measurement = memory.measure(make_task(task, "small"))
    assert measurement["chunk_bytes"] > 0
    ours, theirs = measurement["armillary_bytes"], measurement["reference_bytes"]
    assert 0 < ours <= theirs + measurement["chunk_bytes"] + 1024
    aliases = measurement["armillary"]["aliases"]
    assert aliases > 0, "The state is donated."


@pytest.mark.slow
def test_a_second_start_takes_its_programs_from_the_cache(monkeypatch):
    # The suite's own cache would serve the first start.
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    [pair] = start_time.measure("mlp", "small", num_pairs=1)["pairs"]
    for starts in pair.values():
        assert starts["first"]["compiled"] > 0
        assert starts["second"]["compiled"] == 0
        # In the scope of a device, JAX keeps a program apart from the same one outside.
        needed = starts["first"]["compiled"] + starts["first"]["from_cache"]
        assert starts["second"]["from_cache"] == needed


def start_fake(name: str, case: Case, settings: Settings) -> WorkerProcess:
    assert case.options.steps_per_loop == 10
    behavior = "run" if settings.rounds == 2 else "error"
    seconds = {"armillary": 0.0002, "armillary-saving": 0.0004}[name]
    fake = Path(__file__).with_name("fake_worker.py")
    command = [sys.executable, str(fake), str(seconds), behavior]
    return WorkerProcess(name, command, {"PYTHONPATH": str(REPOSITORY)})


def test_the_cost_of_checkpoints_is_a_ratio_over_bursts_of_one_interval():
    measurement = checkpoint_cost.measure("mlp", "small", 2, start_fake)
    assert measurement["burst_steps"] == 100
    assert len(measurement["contestants"]["armillary-saving"]["seconds"]) == 2
    assert measurement["ratio"]["median"] == pytest.approx(0.5)


@pytest.mark.slow
def test_the_suite_runs_from_end_to_end(tmp_path):
    path = tmp_path / "bench.json"
    result = subprocess.run(
        [
            *(sys.executable, "-m", "benchmarks", "--quick", "--tasks", "mlp"),
            *("--rounds", "2", "--json", str(path)),
            *("--contestants", "reference-step", "reference-scan", "armillary"),
        ],
        capture_output=True,
        text=True,
        cwd=REPOSITORY,
        timeout=patience(280),
    )
    assert result.returncode == 0, result.stderr
    assert "relative to the faster hand-written loop" in result.stdout
    document = json.loads(path.read_text())
    assert document["schema"] == 1
    assert document["machine"]["cores"] >= 1
    (case,) = document["cases"]
    assert (case["task"], case["steps_per_loop"], case["failed"]) == ("mlp", 10, {})
    assert list(case["contestants"]) == [
        "reference-step",
        "reference-scan",
        "armillary",
    ]
    for record in case["contestants"].values():
        assert len(record["seconds"]) == 2
        assert record["ratio"]["low"] <= record["ratio"]["median"]
        assert {"python", "jax", "flax", "numpy"} <= record["versions"].keys()
    losses = [record["losses"] for record in case["contestants"].values()]
    assert losses[0] == pytest.approx(losses[2], rel=1e-3)
