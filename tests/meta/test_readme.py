"""The README shows what its program prints, and the error of a forgotten line."""

import argparse
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from armillary.project._command import prepare_new
from tests.meta.test_docs import REPOSITORY, find_blocks, find_missing
from tests.meta.test_site import load
from tests.patience import patience
from tests.recovery.faults import FAULTS

README = REPOSITORY / "README.md"
DOCS = REPOSITORY / "docs"
chart = load("chart")
REDUCTION = "    gradients = armillary.all_reduce("
# Settings of the test suite that a reader of the README does not have.
OF_THE_TESTS = (
    "JAX_DISABLE_MOST_OPTIMIZATIONS",
    "JAX_NUMPY_RANK_PROMOTION",
    "JAX_TRACEBACK_FILTERING",
    "XLA_FLAGS",
)


def read_program():
    """Returns the first program; the other one continues it with Flax NNX."""
    blocks = [body for info, _, body in find_blocks(README) if info == "python"]
    return blocks[0]


def read_shown(first_words):
    """Returns the block of text that begins with these words, without its indent."""
    text = README.read_text()
    before, _, block = text.partition(first_words)
    indent = before.rpartition("\n")[2]
    return textwrap.dedent(indent + first_words + block.partition("```")[0]).rstrip()


def run(program, folder, *command):
    """Runs a program as a reader does: saved as `train.py`, on four CPU devices."""
    (folder / "train.py").write_text(program)
    environment = {
        name: value for name, value in os.environ.items() if name not in OF_THE_TESTS
    }
    return subprocess.run(
        [sys.executable, *command, str(folder / "train.py")],
        cwd=folder,
        env={**environment, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "4"},
        capture_output=True,
        text=True,
        timeout=patience(300),
    )


def test_the_commands_after_new_are_the_commands_that_it_prints(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    prepare_new(argparse.Namespace(directory=Path("my_project")))()
    printed = read_commands(capsys.readouterr().out.partition("Continue with:\n")[2])
    shown = read_commands(read_shown("cd .."))
    start = shown.index("armillary new my_project") + 1
    assert len(shown[start:]) == 4
    assert shown[start:] == printed[:4]


def read_commands(text):
    return [line.partition(" #")[0].strip() for line in text.splitlines()]


@pytest.mark.slow
def test_the_program_prints_the_lines_that_the_readme_shows(tmp_path):
    ended = run(read_program(), tmp_path)
    assert ended.returncode == 0, ended.stderr
    shown = read_shown("found no checkpoint")
    assert find_missing(ended.stderr, shown) == []
    assert len(ended.stderr.splitlines()) == len(shown.splitlines())


@pytest.mark.slow
def test_the_program_without_its_reduction_ends_with_the_error_that_the_readme_shows(
    tmp_path,
):
    lines = read_program().splitlines()
    kept = [line for line in lines if not line.startswith(REDUCTION)]
    assert len(kept) == len(lines) - 1
    ended = run("\n".join(kept), tmp_path)
    shown = read_shown("armillary.errors.ReplicaMismatchError").splitlines()
    printed = ended.stderr.splitlines()
    start = next(n for n, line in enumerate(printed) if line.startswith(shown[0][:40]))
    assert (
        find_missing("\n".join(printed[start:][: len(shown)]), "\n".join(shown)) == []
    )


@pytest.mark.slow
def test_the_program_prints_the_same_losses_in_two_processes(tmp_path):
    strategy = "armillary.MirroredStrategy()"
    assert strategy in read_program()
    program = read_program().replace(
        strategy, "armillary.MultiWorkerMirroredStrategy()"
    )
    launch = [
        "-m",
        "armillary",
        "launch",
        "--workers",
        "2",
        "--devices-per-worker",
        "2",
    ]
    ended = run(program, tmp_path, *launch)
    assert ended.returncode == 0, ended.stderr
    shown = re.findall(r"output: .+", read_shown("found no checkpoint"))
    assert re.findall(r"output: .+", ended.stdout + ended.stderr) == shown


def test_the_numbers_of_comparisons_are_the_numbers_of_the_compatibility_table():
    table = (DOCS / "internals" / "compatibility.md").read_text()
    counts = dict(re.findall(r"^\| ([a-z ]+) \| (\d+) \|$", table, re.M))
    text = " ".join(README.read_text().split())
    assert f"{int(counts['constructs']):,} constructs" in text
    noted = int(counts["of these with a note"])
    equal = int(counts["as expected"]) - noted
    assert f"{equal:,} give the numbers of plain JAX on one device" in text
    assert f"{noted:,} are right with a note" in text
    assert f"{int(counts['refused with a clear error']):,} are refused" in text


def read_ratios():
    """Returns the ratios of Armillary in the tables of results."""
    return [median for _, median, _, _ in chart.read_results()]


def test_the_chart_shows_the_table_of_results():
    text = chart.CHART.read_text()
    assert text == chart.draw_chart(), "Run `python docs/site/chart.py`."
    assert all(f">{ratio:.2f}</text>" in text for ratio in read_ratios())


def read_platforms(page):
    return re.search(r"^\| platform \|.+?\n\n", page.read_text(), re.M | re.S)[0]


def test_the_platforms_are_the_platforms_of_the_install_page():
    assert read_platforms(README) == read_platforms(DOCS / "start" / "install.md")


PAGES = [
    README,
    DOCS / "migrate" / "comparison.md",
    DOCS / "long_runs" / "performance.md",
]


@pytest.mark.parametrize("page", PAGES)
def test_the_range_of_speeds_is_the_range_of_the_table(page):
    ratios = read_ratios()
    assert len(ratios) > 10
    text = " ".join(page.read_text().split())
    assert f"{min(ratios):.2f} to {max(ratios):.1f} times the speed" in text


def test_make_soak_injects_as_many_faults_and_kinds_as_the_pages_say():
    makefile = (REPOSITORY / "Makefile").read_text()
    (faults,) = re.findall(r"^KILLS \?= (\d+)$", makefile, re.M)
    words = {10: "ten"}
    kinds = f"faults of {words[len(FAULTS)]} kinds"
    assert kinds in " ".join(README.read_text().split())
    evidence = (DOCS / "internals" / "evidence.md").read_text()
    assert f"injects {kinds}" in evidence
    assert f"`make soak` has {int(faults):,}," in evidence
