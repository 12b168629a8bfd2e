"""Tests that the benchmark of rows in jobs runs, and compares in pairs."""

import json

import pytest

from armillary.data import InputOptions
from benchmarks import rows_of_jobs


@pytest.mark.slow
def test_rows_of_a_job_are_measured(tmp_path, capsys):
    path = tmp_path / "bench.json"
    options = ["--processes", "2", "--documents", "300", "--row-length", "64"]
    options += ["--batch-size", "8", "--batches", "2", "--rounds", "1"]
    rows_of_jobs.main([*options, "--json", str(path)])
    found = json.loads(path.read_text())["measurements"]["rows_of_jobs"]["2"]

    names = {"armillary", "mixture", "grain", "grain, no thread"}
    assert names <= set(found)
    for values in found.values():
        assert values["rows_per_second"] > 0
        assert values["low"] <= values["ratio"] <= values["high"]
    assert found["grain"]["ratio"] == 1
    assert "Rows of 64 tokens, 8 in a batch" in capsys.readouterr().out


def test_processes_must_share_a_batch_equally(capsys):
    with pytest.raises(SystemExit):
        rows_of_jobs.main(["--processes", "1", "3", "--batch-size", "8"])
    assert "--batch-size is 8, which 3 processes" in capsys.readouterr().err


def test_grain_reads_as_far_ahead_as_armillary():
    assert InputOptions().prefetch == rows_of_jobs._NUM_AHEAD


def test_the_slowest_process_of_each_turn_counts():
    processes = [
        {"grain": [1.0, 4.0], "armillary": [1.0, 1.0]},
        {"grain": [2.0, 3.0], "armillary": [0.5, 2.0]},
    ]
    found = rows_of_jobs.summarize(processes, num_rows=12)
    assert found["grain"]["rows_per_second"] == 4
    assert found["armillary"] == {
        "rows_per_second": 8,
        "ratio": 2,
        "low": 2,
        "high": 2,
    }
