"""Tests that the benchmarks of scale run, and measure what they claim."""

import json

import pytest

from benchmarks import boundary_cost, scaling


@pytest.mark.slow
def test_a_step_is_planned_for_more_and_more_devices(tmp_path, capsys):
    path = tmp_path / "bench.json"
    options = ["--size", "small", "--topologies", "2", "64", "--json", str(path)]
    scaling.main(options)
    rows = json.loads(path.read_text())["measurements"]["scaling"]["rows"]
    assert [row["num_replicas"] for row in rows] == [2, 64]
    # The bytes that a replica sends do not depend on the number of replicas.
    small, large = (
        sum(each["num_bytes"] for each in row["collectives"]) for row in rows
    )
    assert small == large > 0
    assert all(row["trace_seconds"] > 0 and row["peak_bytes"] > 0 for row in rows)
    assert "One step of mlp, planned" in capsys.readouterr().out


@pytest.mark.slow
def test_an_exchange_of_processes_is_measured(tmp_path, capsys):
    path = tmp_path / "bench.json"
    boundary_cost.main(["--processes", "2", "--json", str(path)])
    (row,) = json.loads(path.read_text())["measurements"]["boundary_cost"]["rows"]
    assert row["processes"] == 2
    assert 0 < row["median"] <= row["slow"] < 10
    assert "An exchange of all processes" in capsys.readouterr().out
