"""Tests that a save in progress is completed when its program ends."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jax.numpy as jnp
import pytest

from armillary.checkpoint import Checkpoint, CheckpointManager
from tests.patience import patience
from tests.tiers import slow_after_first

PRELUDE = """
import sys
from types import SimpleNamespace
import jax.numpy as jnp
from armillary.checkpoint import Checkpoint, CheckpointManager
holder = SimpleNamespace(arrays=[jnp.zeros((128, 1024)) for _ in range(4)])
manager = CheckpointManager(Checkpoint(holder=holder), sys.argv[1], max_to_keep=2)
def save(step):
    holder.arrays = [jnp.full_like(array, step) for array in holder.arrays]
    return manager.save(step)
"""


def run(code: str, directory: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", PRELUDE + code, str(directory)],
        check=False,
        timeout=patience(120),
        capture_output=True,
        text=True,
    )


@slow_after_first(
    ("ending", "returncode"),
    [("", 0), ("sys.exit('stop')\n", 1)],
    ids=["last line", "exit message"],
)
def test_a_program_that_ends_right_after_save_completes_it_quietly(
    tmp_path, ending, returncode
):
    child = run(f"print(save(3))\n{ending}", tmp_path)

    assert child.returncode == returncode
    assert child.stdout == f"{tmp_path / 'checkpoint_3'}\n"
    assert child.stderr == ("stop\n" if "stop" in ending else "")
    holder = SimpleNamespace(arrays=[jnp.zeros((128, 1024)) for _ in range(4)])
    CheckpointManager(Checkpoint(holder=holder), tmp_path).restore_or_initialize()
    assert all((array == 3).all() for array in holder.arrays)


@pytest.mark.slow
def test_a_save_that_fails_as_the_program_ends_is_logged(tmp_path):
    child = run(
        "from armillary.checkpoint import _writer\n"
        "write = _writer.write_folder\n"
        "def write_and_fail(*args, **kwargs):\n"
        "    wait = write(*args, **kwargs)\n"
        "    def fail():\n"
        "        wait()\n"
        "        raise OSError('No space left on device')\n"
        "    return fail\n"
        "_writer.write_folder = write_and_fail\n"
        "save(3)\n",
        tmp_path,
    )

    assert "checkpoint_3` failed: OSError: No space left" in child.stderr
    assert "Traceback" not in child.stderr
