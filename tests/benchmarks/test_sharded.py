"""Tests of the comparison of a step that devices share with one written by hand."""

import json
from io import StringIO

import pytest
from rich.console import Console

from benchmarks import sharded
from benchmarks.measure import Settings
from benchmarks.processes import WorkerProcess
from tests.benchmarks.test_measure import start_fake

SETTINGS = Settings(rounds=2, burst_steps=4, lead_in_steps=2)


def start_alike(name: str, size: str) -> WorkerProcess:
    del size
    return start_fake(0.004 if name == "by-hand" else 0.001)


def test_the_ratio_and_the_memory_are_relative_to_the_hand_written_loop():
    found = sharded.measure("small", SETTINGS, start_alike)

    ratio = found["ratio"]
    assert ratio["low"] == ratio["median"] == ratio["high"] == pytest.approx(4.0)
    peaks = found["peak_bytes"]
    assert found["peak_ratio"] == peaks["armillary"] / peaks["by-hand"]
    assert min(peaks.values()) > 1_000_000
    output = StringIO()
    Console(file=output, width=100).print(sharded.make_table(found))
    for part in ("by-hand", "armillary", f"{ratio['median']:.3f}"):
        assert part in output.getvalue()


def test_a_loop_that_fails_is_an_error():
    def start(name: str, size: str) -> WorkerProcess:
        del size
        return start_fake(behavior="run" if name == "by-hand" else "error")

    with pytest.raises(RuntimeError, match="armillary"):
        sharded.measure("small", SETTINGS, start)


@pytest.mark.slow
def test_both_loops_run_and_reach_the_same_losses(tmp_path, capsys):
    path = tmp_path / "bench.json"
    sharded.main(
        ["--size", "small", "--rounds", "1", "--steps", "3", "--json", str(path)]
    )

    assert "armillary" in capsys.readouterr().out
    found = json.loads(path.read_text())["measurements"]["sharded"]
    assert found["losses"]["armillary"] == pytest.approx(
        found["losses"]["by-hand"], rel=1e-2
    )
