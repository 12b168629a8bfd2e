"""Tests of checkpoints in an object store, a local server that acts as Google's.

They need `gcsfs` and `gcp-storage-emulator`, which `make libraries` installs.
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY
from tests.patience import patience

pytestmark = pytest.mark.slow

SERVER = """
import sys
from gcp_storage_emulator.server import create_server
server = create_server("127.0.0.1", 0, in_memory=True, default_bucket="bucket")
server.start()
print(server._api._httpd.server_address[1], flush=True)
sys.stdin.read()
server.stop()
"""
PRELUDE = """
import sys
from types import SimpleNamespace
import jax.numpy as jnp
import numpy as np
from etils import epath
import armillary
from armillary.checkpoint import _checksums, _commit, _folder

directory = epath.Path(sys.argv[1])
state = SimpleNamespace(large=jnp.arange(300_000.0), small=jnp.ones(3))

def make_manager():
    checkpoint = armillary.Checkpoint(state=state)
    return armillary.CheckpointManager(checkpoint, directory, max_to_keep=2)

def save(number):
    state.large = jnp.full_like(state.large, number)
    manager.save(number)
    manager.sync()

def restore():
    state.large = jnp.zeros_like(state.large)
    path = make_manager().restore_or_initialize()
    return path and path.rpartition("/")[2], float(state.large[7])

def names():
    return sorted(path.name for path in directory.iterdir())

manager = make_manager()
"""


@pytest.fixture(scope="module")
def environment() -> Iterator[dict[str, str]]:
    """Starts the server; yields the variables with which programs find it."""
    pytest.importorskip("gcsfs", reason="`gcsfs` is not installed: `make libraries`")
    pytest.importorskip("gcp_storage_emulator")
    with subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", SERVER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as server:
        assert server.stdout is not None
        url = f"http://127.0.0.1:{server.stdout.readline().strip()}"
        yield {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(REPOSITORY), *sys.path]),
            "STORAGE_EMULATOR_HOST": url,
            "TENSORSTORE_GCS_HTTP_URL": url,
            "GOOGLE_AUTH_TOKEN": "none",
        }
        server.kill()


def run(code: str, environment: dict[str, str], folder: Path, *words: str) -> str:
    """Runs a program in a directory of the store; returns what it prints."""
    program = subprocess.run(
        [sys.executable, "-c", PRELUDE + code, f"gs://bucket/{folder.name}", *words],
        check=False,
        env=environment,
        timeout=patience(180),
        capture_output=True,
        text=True,
    )
    assert program.returncode == 0, program.stderr
    return program.stdout


def test_the_newest_checkpoints_are_kept_and_restored(environment, tmp_path):
    code = "for number in (1, 2, 2, 3): save(number)\nprint(names(), restore())"
    found = run(code, environment, tmp_path)
    # Saved again, number 2 has got a name of its own.
    assert found == "['checkpoint_2.1', 'checkpoint_3'] ('checkpoint_3', 3.0)\n"


@pytest.mark.parametrize(
    "place",
    [
        "_commit.copy_arrays",
        "_commit.merge_arrays",
        "_commit.write_checksums",
        "_commit.complete_folder",
    ],
)
def test_an_interrupted_save_does_not_count_and_its_files_go(
    environment, tmp_path, place
):
    code = (
        f"save(1)\nimport os\n{place} = lambda *args, **kwargs: os._exit(0)\nsave(2)\n"
    )
    run(code, environment, tmp_path)

    found = run("print(restore())\nsave(5)\nprint(names())", environment, tmp_path)

    is_complete = place == "_commit.complete_folder"
    newest = "('checkpoint_2', 2.0)" if is_complete else "('checkpoint_1', 1.0)"
    kept = "checkpoint_2" if is_complete else "checkpoint_1"
    assert found.splitlines() == [newest, f"['{kept}', 'checkpoint_5']"]


def test_an_interrupted_removal_leaves_no_checkpoint_that_counts(environment, tmp_path):
    code = (
        "save(1)\n"
        "save(2)\n"
        "type(directory).rmtree = lambda path: None\n"
        "_folder.remove(directory / 'checkpoint_2')\n"
    )
    run(code, environment, tmp_path)

    found = run("print(restore())\nsave(3)\nprint(names())", environment, tmp_path)

    assert found.splitlines() == [
        "('checkpoint_1', 1.0)",
        "['checkpoint_1', 'checkpoint_3']",
    ]


def test_a_damaged_object_is_found_and_the_checkpoint_skipped(environment, tmp_path):
    code = (
        "save(1)\n"
        "save(2)\n"
        "files = _checksums.find_files(directory / 'checkpoint_2' / 'arrays')\n"
        "largest = max(files, key=lambda file: file.stat().length)\n"
        "data = bytearray(largest.read_bytes())\n"
        "data[1000] ^= 1\n"
        "largest.write_bytes(bytes(data))\n"
        "print(restore())\n"
    )
    assert run(code, environment, tmp_path) == "('checkpoint_1', 1.0)\n"


def test_after_an_interrupted_first_save_a_run_starts_from_scratch(
    environment, tmp_path
):
    code = "import os\n_commit.merge_arrays = lambda folder: os._exit(0)\nsave(1)\n"
    run(code, environment, tmp_path)

    found = run("print(restore())\nsave(2)\nprint(names())", environment, tmp_path)

    assert found.splitlines() == ["(None, 0.0)", "['checkpoint_2']"]


def test_a_program_that_waits_sees_a_checkpoint_of_another_one(environment, tmp_path):
    code = (
        "import subprocess\n"
        "save(1)\n"
        "before = names()\n"
        "text = open(sys.argv[2]).read() + 'save(2)'\n"
        "subprocess.run([sys.executable, '-c', text, sys.argv[1]], check=True)\n"
        "print(before, names(), restore())\n"
    )
    program = tmp_path / "program"
    program.write_text(PRELUDE)
    found = run(code, environment, tmp_path, str(program))
    assert found == (
        "['checkpoint_1'] ['checkpoint_1', 'checkpoint_2'] ('checkpoint_2', 2.0)\n"
    )
