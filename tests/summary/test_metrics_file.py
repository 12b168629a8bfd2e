"""Tests of `metrics.jsonl`: its lines, and reading it after a resumed run."""

import json
import math
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from armillary._json_values import find_numbers
from armillary._rising_clock import RisingClock
from armillary.summary import Histogram, Text, read_metrics
from armillary.summary._metrics_file import MetricsFile


def write_run(file, *records):
    for kind, step in records:
        file.write(kind, step, values={"loss": float(step)})
    file.flush()


def read_steps(path):
    return [(record["record"], record["step"]) for record in read_metrics(path)]


def test_a_record_is_a_line_that_needs_no_package(tmp_path):
    file = MetricsFile(tmp_path)
    output = {
        "loss": np.float32(0.5),
        "classes": {"a": jnp.asarray(2, jnp.bfloat16), "found": np.bool_(True)},
        "bad": {"nan": math.nan, "high": jnp.asarray(jnp.inf), "low": -math.inf},
        "kernel": Histogram(np.ones(3)),
        "note": Text("left out"),
        "array": np.ones(2),
        "key": jax.random.key(0),
        "word": "left out",
    }
    file.write("train", 100, steps_per_second=2.0, values=find_numbers(output))
    assert not (tmp_path / "metrics.jsonl").exists()
    file.flush()

    (line,) = (tmp_path / "metrics.jsonl").read_text().splitlines()
    record = json.loads(line)
    assert list(record)[:3] == ["record", "time", "step"]
    assert record.pop("time") > 1e9
    assert record == {
        "record": "train",
        "step": 100,
        "steps_per_second": 2.0,
        "values": {
            "loss": 0.5,
            "classes/a": 2.0,
            "classes/found": 1,
            "bad/nan": "NaN",
            "bad/high": "Infinity",
            "bad/low": "-Infinity",
        },
    }
    values = read_metrics(tmp_path)[0]["values"]
    assert math.isnan(values["bad/nan"])
    assert (values["bad/high"], values["bad/low"]) == (math.inf, -math.inf)


def test_a_later_attempt_takes_the_place_of_what_it_did_again(tmp_path):
    first = [("start", 0), ("train", 10), ("eval", 10), ("train", 20), ("train", 30)]
    write_run(MetricsFile(tmp_path), *first)
    write_run(MetricsFile(tmp_path), ("start", 10), ("train", 20), ("eval", 20))
    # Its last evaluation is all that the third attempt finds to do.
    write_run(MetricsFile(tmp_path), ("start", 20), ("eval", 20))

    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert len(lines) == 10
    assert read_steps(tmp_path) == [
        ("start", 0),
        ("train", 10),
        ("eval", 10),
        ("start", 10),
        ("train", 20),
        ("start", 20),
        ("eval", 20),
    ]


@pytest.mark.parametrize("jump", [-600.0, 600.0])
def test_records_keep_the_order_of_writing_if_a_clock_jumps(
    jump, tmp_path, monkeypatch
):
    wall = iter([1000.0] * 5 + [1000.0 + jump] * 5)
    monkeypatch.setattr(time, "time", lambda: next(wall))
    for attempt in range(2):
        # The files of a run share a clock.
        clock = RisingClock()
        train = MetricsFile(tmp_path / "train", clock=clock)
        evaluation = MetricsFile(tmp_path / "eval", clock=clock)
        write_run(train, ("start", 10 * attempt), ("train", 20))
        write_run(evaluation, ("eval", 20))
        write_run(train, ("train", 30))
        write_run(evaluation, ("eval", 30))

    assert read_steps(tmp_path) == [
        ("start", 0),
        ("start", 10),
        ("train", 20),
        ("eval", 20),
        ("train", 30),
        ("eval", 30),
    ]
    times = [each["time"] for each in read_metrics(tmp_path)]
    assert times == sorted(set(times))


def test_the_order_of_lines_counts_in_a_file_of_an_earlier_release(tmp_path):
    written = [("start", 0, 900), ("train", 20, 1000), ("start", 10, 400)]
    written.append(("train", 20, 500))
    lines = [
        json.dumps({"record": record, "time": seconds, "step": step})
        for record, step, seconds in written
    ]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + "\n")

    assert read_steps(tmp_path) == [("start", 0), ("start", 10), ("train", 20)]
    assert read_metrics(tmp_path)[-1]["time"] == 500


def test_runs_next_to_each_other_keep_their_records(tmp_path):
    """As of two trainers that take turns, each with summaries of its own."""
    first, second = MetricsFile(tmp_path / "x"), MetricsFile(tmp_path / "y")
    write_run(first, ("start", 0), ("train", 10))
    write_run(second, ("start", 0), ("train", 10))
    write_run(first, ("train", 20))

    found = [(r["folder"], r["record"], r["step"]) for r in read_metrics(tmp_path)]
    assert sorted(found) == [
        ("x", "start", 0),
        ("x", "train", 10),
        ("x", "train", 20),
        ("y", "start", 0),
        ("y", "train", 10),
    ]


def test_files_of_one_run_are_read_together(tmp_path):
    train, evaluation = MetricsFile(tmp_path / "train"), MetricsFile(tmp_path / "eval")
    write_run(train, ("start", 0), ("train", 10), ("train", 20))
    write_run(evaluation, ("eval", 10), ("eval", 20))
    write_run(train, ("start", 10))

    found = [(each["folder"], each["step"]) for each in read_metrics(tmp_path)]
    assert found == [("train", 0), ("train", 10), ("eval", 10), ("train", 10)]


@pytest.mark.parametrize("directory", [None, "gs://bucket/run"])
def test_without_a_local_directory_nothing_is_written(directory, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_run(MetricsFile(directory), ("train", 1))
    assert not list(tmp_path.iterdir())


def test_lines_that_cannot_be_read_are_errors(tmp_path):
    with pytest.raises(ValueError, match=r"`run_dir` is .*no `metrics\.jsonl` in it"):
        read_metrics(tmp_path)
