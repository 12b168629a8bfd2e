"""Tests that the benchmark of saves runs, and measures both contestants."""

import json

import pytest

from benchmarks import joint_saves


@pytest.mark.slow
def test_saves_of_several_processes_are_measured(tmp_path, capsys):
    path = tmp_path / "bench.json"
    options = ["--processes", "2", "--megabytes", "8", "--rounds", "1"]
    joint_saves.main([*options, "--json", str(path)])
    found = json.loads(path.read_text())["measurements"]["joint_saves"]["2"]

    for name in ("armillary", "orbax", "memory"):
        assert 0 < found[name]["blocked"] <= found[name]["saved"]
        assert found[name]["restored"] > 0
    # Half of the arrays, and half of the files to verify.
    assert 7e6 < found["armillary"]["read_bytes"] < 11e6
    assert "8 MB over 2 devices in each process" in capsys.readouterr().out


def test_the_slowest_process_of_each_round_counts():
    def process(*seconds: float) -> dict[str, dict[str, list[float]]]:
        values = {key: list(seconds) for key in joint_saves._COLUMN_NAMES}
        return {"orbax": values}

    found = joint_saves.summarize([process(1.0, 5.0, 3.0), process(2.0, 4.0, 9.0)])

    assert found["orbax"]["blocked"] == 5.0
