"""Tests of the check for a GPU: its parts, its limit, and its report."""

import os
import re
import subprocess
import sys

import pytest

from benchmarks.processes import REPOSITORY
from tests.patience import patience

SCRIPT = REPOSITORY / "benchmarks" / "gpu.sh"
# Stands for an interpreter: finds a device, and does one thing for each part.
FAKE = """#!/bin/sh
case "$1 $2" in
  "-c import"*) echo "{device} with JAX 0" ;;
  "-m pytest") {tests}; echo "5 passed in 1.00s" ;;
  "-m benchmarks") {speed}; echo "    armillary 10.0 steps/s (1.000)" ;;
  "-m benchmarks.lifecycle") {resume}; echo "│gpt  │ armillary │ equal bits│" ;;
  *) exit 9 ;;
esac
"""


def check(folder, *options, device="gpu H200", **parts):
    python = folder / "python"
    parts = {"tests": ":", "speed": ":", "resume": ":", **parts}
    limit = parts.pop("limit", "100")
    python.write_text(FAKE.format(device=device, **parts))
    python.chmod(0o755)
    variables = {"PYTHON": str(python), "OUT": str(folder / "out"), "LIMIT": limit}
    return subprocess.run(
        [str(SCRIPT), *options],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=patience(60),
    )


def test_the_report_has_a_line_for_each_part_and_the_time_of_all(tmp_path):
    ended = check(tmp_path)

    assert ended.returncode == 0, ended.stderr
    report = re.sub(r"\d+ s\b", "1 s", ended.stdout)
    assert report.splitlines() == [
        "H200 with JAX 0",
        "== tests: ok (1 s)",
        "5 passed in 1.00s",
        "== speed: ok (1 s)",
        "    armillary 10.0 steps/s (1.000)",
        "== resume: ok (1 s)",
        "│gpt  │ armillary │ equal bits│",
        "== 0 of 3 parts failed: none. 1 s of 1 s.",
    ]


def test_a_part_that_fails_does_not_stop_the_others(tmp_path):
    ended = check(tmp_path, tests="echo 'FAILED tests/a.py::b'; exit 1")

    assert ended.returncode == 1
    assert "== tests: failed with exit code 1, see " in ended.stdout
    assert "FAILED tests/a.py::b" in ended.stdout
    assert "== resume: ok" in ended.stdout
    assert "== 1 of 3 parts failed: tests." in ended.stdout


def test_the_limit_stops_a_part_and_leaves_out_the_rest(tmp_path):
    ended = check(tmp_path, tests="exec sleep 100000", limit="2")

    assert ended.returncode == 1
    assert re.search(r"== tests: stopped after [012] s, see ", ended.stdout)
    assert "== speed: left out, because 2 s are over" in ended.stdout
    assert "== 3 of 3 parts failed: tests speed resume." in ended.stdout


@pytest.mark.parametrize(
    ("options", "device", "message"),
    [
        ([], "cpu cpu", r"finds cpu cpu with JAX 0, and this check needs a gpu"),
        (["--try"], "gpu H200", r"finds gpu H200 with JAX 0, .* needs a cpu"),
        (["--fast"], "gpu H200", r"`--fast` is no option. Use `--try`"),
    ],
)
def test_a_wrong_device_or_option_is_refused(options, device, message, tmp_path):
    ended = check(tmp_path, *options, device=device)

    assert ended.returncode == 2
    assert re.search(message, ended.stderr)
    assert ended.stdout == ""


def test_each_test_that_the_script_names_exists():
    text = SCRIPT.read_text()
    files = set(re.findall(r"tests/[\w/]+\.py", text))
    named = re.findall(r"(tests/[\w/]+\.py)::(\w+)", text)

    assert len(files) >= 10
    assert [name for name in files if not (REPOSITORY / name).is_file()] == []
    assert len(named) == 3
    for file, test in named:
        assert f"def {test}(" in (REPOSITORY / file).read_text()


@pytest.mark.slow
def test_it_runs_on_a_cpu(tmp_path):
    limit = int(patience(480))
    ended = subprocess.run(
        [str(SCRIPT), "--try"],
        env={
            **os.environ,
            "PYTHON": sys.executable,
            "OUT": str(tmp_path),
            "LIMIT": str(limit),
        },
        capture_output=True,
        text=True,
        timeout=limit + patience(60),
    )

    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "1 passed" in ended.stdout
    assert ended.stdout.count("steps/s") >= 2
    assert re.search(r"gpt .* armillary .* equal bits", ended.stdout)
    assert "0 of 3 parts failed" in ended.stdout
