"""Tests of the parameter server benchmark: its arithmetic, and one tiny run."""

import json
import sys

import numpy as np
import pytest
from rich.console import Console

from benchmarks import parameter_server
from benchmarks.closures import STEP, check_calls, make_shapes
from benchmarks.processes import WorkerProcess

FAKE = """
import json, sys, time
{before}
ready = {{"event": "ready", "setup_seconds": 0, "versions": {{}}, "facts": {{}}}}
print(json.dumps(ready), flush=True)
for line in sys.stdin:
    steps = json.loads(line).get("run")
    if steps is None:
        break
    answer = {{"event": "ran", "seconds": steps * {seconds}, "loss": 0}}
    print(json.dumps(answer), flush=True)
"""
SECONDS = {"copies": 0.01, "armillary": 0.04, "tensorflow": 0.08}


def start_fake(name, num_bytes, num_workers):
    before = "raise SystemExit('It broke.')" if num_workers == 3 else ""
    program = FAKE.format(seconds=SECONDS[name], before=before)
    return WorkerProcess(name, [sys.executable, "-c", program])


def render(rows, names):
    console = Console(width=120)
    with console.capture() as captured:
        console.print(parameter_server.make_table(rows, names))
    return captured.get()


def test_the_variables_are_four_equal_arrays():
    assert make_shapes(1024) == [(64,)] * 4
    with pytest.raises(ValueError, match=r"`num_bytes` is 1000, but .* Use 992\."):
        make_shapes(1000)


def test_calls_that_were_lost_or_made_twice_are_noticed():
    right = np.full(3, -7 * STEP, "float32")
    assert check_calls([right, right], 7) == 7
    wrong = right.copy()
    wrong[1] -= STEP
    with pytest.raises(RuntimeError, match=r"After 7 calls, .* had 7 to 8 updates"):
        check_calls([right, wrong], 7)


def test_ratios_compare_speeds_of_the_same_round():
    found = parameter_server.compare({"armillary": [1.0, 4.0], "copies": [0.5, 1.0]})
    assert found["calls_per_second"] == {"armillary": 0.4, "copies": 1 / 0.75}
    assert found["ratios"]["copies"] == {"median": 0.375, "low": 0.25, "high": 0.5}


def test_contestants_take_turns_and_the_table_shows_ratios(monkeypatch, tmp_path):
    monkeypatch.setattr(parameter_server, "_PEER_PYTHON", tmp_path)
    names = list(SECONDS)
    row = parameter_server.measure(1024, 2, names, 3, 1.0, start_fake)
    assert row["bursts"] == {"copies": 100, "armillary": 25, "tensorflow": 13}
    assert row["ratios"]["copies"]["median"] == pytest.approx(0.25)
    assert row["ratios"]["tensorflow"]["median"] == pytest.approx(2)
    shown = render([row], names)
    assert "0.25 (0.25 to 0.25)" in shown
    assert "12.5" in shown


def test_a_contestant_that_fails_or_is_not_installed_has_no_row(monkeypatch, tmp_path):
    monkeypatch.setattr(parameter_server, "_PEER_PYTHON", tmp_path / "none")
    row = parameter_server.measure(1024, 3, list(SECONDS), 3, 1.0, start_fake)
    assert "It broke." in row["missing"]["armillary"]
    shown = render([row], list(SECONDS))
    assert "failed" in shown
    assert "not installed" in shown


@pytest.mark.slow
@pytest.mark.xdist_group("ray")
def test_a_tiny_run_counts_calls_from_end_to_end(tmp_path, capsys):
    pytest.importorskip("ray")
    path = tmp_path / "bench.json"
    parameter_server.main(
        [
            *("--sizes", "1KB", "--workers", "1", "--rounds", "1"),
            *("--seconds-per-burst", "0.1", "--contestants", "copies", "armillary"),
            *("--json", str(path)),
        ]
    )
    assert "Calls a second" in capsys.readouterr().out
    (row,) = json.loads(path.read_text())["measurements"]["parameter_server"]["rows"]
    assert row["missing"] == {}
    assert 0 < row["ratios"]["copies"]["median"] < 1
