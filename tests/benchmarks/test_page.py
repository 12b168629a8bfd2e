"""Tests of the page that compares libraries, and of their environments."""

import json
import subprocess

from benchmarks import page
from benchmarks.environments import find_pythons, make_environments
from tests.benchmarks.test_lifecycle import make_records
from tests.benchmarks.test_report import make_entry


def make_document(**changes) -> dict:
    entry = make_entry(skipped={"levanter": "It needs an older JAX."})
    for record in entry["contestants"].values():
        record["versions"] = {"jax": "0.10.2"}
    return {
        "started": "2026-11-30T06:20:00",
        "machine": {"cpu": "A processor", "cores": 2, "load_at_start": 0.25},
        "settings": {"rounds": 5},
        "cases": [entry],
        "measurements": {"lifecycle": {"mlp": make_records(loss=0.9)}},
        **changes,
    }


def test_the_page_has_speeds_a_life_and_the_reasons(tmp_path):
    document = tmp_path / "bench.json"
    document.write_text(json.dumps(make_document()))
    output = tmp_path / "peers.md"
    page.main([str(document), str(output)])
    text = output.read_text()

    assert "Measured on 2026-11-30, on A processor with 2 cores, under a" in text
    assert "| mlp | loop 100 | 4,000.0 | 0.97 (0.87-1.07) |" in text
    assert "| mlp | tunix | 2.00 s | 2.00 s | 300 MB | 0.50 s | 0.75 s |" in text
    assert "- levanter left out of mlp (loop 100): It needs an older JAX." in text
    assert "- tunix on mlp: the losses of the first steps differ by 8.0e-01" in text
    assert text.count("\n## ") == 3


def test_a_document_without_cases_gives_a_page_without_them():
    text = page.make_page(make_document(cases=[]))

    assert "## Steps per second" not in text
    assert "## From the start of a process to a restore" in text


def test_an_environment_is_made_once_and_a_failure_has_a_reason(tmp_path):
    commands = []

    def run(command, **options):
        commands.append(command)
        is_good = "-r" not in command or "tunix.txt" in command[-1]
        answer = "" if is_good else "Collecting\nERROR: No matching distribution"
        if command[1:3] == ["-m", "venv"]:
            folder = tmp_path / command[-1] / "bin"
            folder.mkdir(parents=True)
            (folder / "python").touch()
        return subprocess.CompletedProcess(command, int(not is_good), "", answer)

    problems = make_environments(["tunix", "kauldron"], tmp_path, run)

    assert problems == {"kauldron": "ERROR: No matching distribution"}
    assert find_pythons([], tmp_path)["tunix"] == str(
        tmp_path / ".venv-bench-tunix" / "bin" / "python"
    )
    assert "--no-deps" in commands[1]
    commands.clear()
    assert make_environments(["tunix"], tmp_path, run) == {}
    assert commands == []
