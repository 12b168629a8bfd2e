"""The README shows what its program prints, and the error of a forgotten line."""

import os
import subprocess
import sys
import textwrap

import pytest

from tests.meta.test_docs import REPOSITORY, find_blocks, find_missing
from tests.patience import patience

README = REPOSITORY / "README.md"
REDUCTION = "    gradients = armillary.all_reduce("
# Settings of the test suite that a reader of the README does not have.
OF_THE_TESTS = (
    "JAX_DISABLE_MOST_OPTIMIZATIONS",
    "JAX_NUMPY_RANK_PROMOTION",
    "JAX_TRACEBACK_FILTERING",
    "XLA_FLAGS",
)


def read_program():
    (program,) = (body for info, _, body in find_blocks(README) if info == "python")
    return program


def read_shown(first_words):
    """Returns the block of text that begins with these words, without its indent."""
    text = README.read_text()
    before, _, block = text.partition(first_words)
    indent = before.rpartition("\n")[2]
    return textwrap.dedent(indent + first_words + block.partition("```")[0]).rstrip()


def run(program, folder):
    """Runs a program as a reader does: saved as `train.py`, on four CPU devices."""
    (folder / "train.py").write_text(program)
    environment = {
        name: value for name, value in os.environ.items() if name not in OF_THE_TESTS
    }
    return subprocess.run(
        [sys.executable, str(folder / "train.py")],
        cwd=folder,
        env={**environment, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "4"},
        capture_output=True,
        text=True,
        timeout=patience(300),
    )


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
