"""Tests of finding runs in folders, and of reading their files."""

import json

from armillary.report._page import make_page
from armillary.report._run_files import find_runs, read_run, read_runs


def test_a_run_is_its_last_attempt_and_what_that_built_on(crashed):
    run = read_run(crashed)
    assert (run.name, run.step, run.state, run.began) == ("crashed", 40, "done", 1000.0)
    assert run.curves["train", "loss"] == [
        (10, 1.0),
        (20, float("inf")),
        (30, 0.5),
        (40, 0.25),
    ]
    assert run.curves["eval", "loss"] == [(20, 0.9), (40, 0.3)]
    assert run.curves["eval test", "accuracy"] == [(20, 0.5)]
    assert run.curves["train", "steps_per_second"][-1] == (40, 4.0)
    assert [each.number for each in run.checkpoints] == [20, 30, 40]
    assert run.goodput is not None
    assert (run.goodput.num_attempts, run.goodput.num_lost_steps) == (2, 10)
    assert len(run.starts) == 2


def test_a_run_that_was_evaluated_first_is_a_run(crashed):
    path = crashed / "train" / "metrics.jsonl"
    first = '{"record": "eval", "time": 990.0, "step": 0, "values": {}}\n'
    path.write_text(first + path.read_text())
    assert find_runs(crashed.parent) == [crashed]


def test_runs_are_found_at_any_depth_and_named_apart(crashed, short, tmp_path):
    assert find_runs(tmp_path / "runs") == [crashed, short]
    assert find_runs(crashed) == [crashed]
    names = [run.name for run in read_runs([crashed, tmp_path / "runs"])]
    assert names == ["crashed", "short"]
    other = tmp_path / "other" / "short"
    other.parent.mkdir()
    other.symlink_to(short, target_is_directory=True)
    assert [run.name for run in read_runs([other, short])] == ["short"]


def test_equal_names_are_distinguished_by_the_names_above(short, tmp_path):
    copy = tmp_path / "runs" / "again" / "short"
    copy.mkdir(parents=True)
    (copy / "metrics.jsonl").write_bytes((short / "metrics.jsonl").read_bytes())
    names = [run.name for run in read_runs([tmp_path])]
    assert names == ["again/short", "sweep/short"]


def test_speeds_are_curves_and_each_device_is_described(short):
    facts = {
        "model_flops_per_step": 44.8e6,
        "state_bytes": 41_900,
        "peak_flops_per_second": 989e12,
    }
    fields = {"record": "train", "time": 2004.0, "step": 4, "steps_per_second": 4.0}
    speeds = {"tokens_per_second": 1e6, "mfu": 0.4, "per_device": facts}
    line = json.dumps(fields | speeds | {"values": {"loss": 0.1, "mfu": 0.5}})
    with open(short / "metrics.jsonl", "a") as file:
        file.write(f"{line}\n")

    run = read_run(short)

    assert run.curves["train", "tokens_per_second"] == [(4, 1e6)]
    # The program's own number comes first, as in TensorBoard.
    assert run.curves["train", "mfu"] == [(4, 0.5)]
    assert run.per_device == facts
    page = make_page([run])
    for name, shown in {
        "model_flops_per_step": "44.8 MFLOP",
        "state_bytes": "41.9 kB",
        "peak_flops_per_second": "989 TFLOP/s",
    }.items():
        row = page.partition(f"{name}, each device")[2].partition("</tr>")[0]
        assert shown in row
