"""Tests of what is left when a process ends, in the ways that processes end."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jax.numpy as jnp
import pytest

from armillary.checkpoint import Checkpoint, CheckpointManager

PRELUDE = """
import os, signal, sys
from types import SimpleNamespace
import jax, jax.numpy as jnp, numpy as np
from armillary.checkpoint import Checkpoint, CheckpointManager
holder = SimpleNamespace(arrays=[jnp.zeros((128, 1024)) for _ in range(4)])
manager = CheckpointManager(Checkpoint(holder=holder), sys.argv[1], max_to_keep=2)
def save(step):
    holder.arrays = [jnp.full_like(array, step) for array in holder.arrays]
    return manager.save(step)
"""


def run(code: str, directory: Path, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", PRELUDE + code, str(directory)],
        check=False,
        timeout=120,
        capture_output=True,
        text=True,
        env={**os.environ, **env},
    )


def restore(directory: Path) -> tuple[CheckpointManager, str | None, list[float]]:
    holder = SimpleNamespace(arrays=[jnp.zeros((128, 1024)) for _ in range(4)])
    manager = CheckpointManager(Checkpoint(holder=holder), directory, max_to_keep=2)
    path = manager.restore_or_initialize()
    return (
        manager,
        path,
        [float(value) for a in holder.arrays for value in (a.min(), a.max())],
    )


def assert_usable(directory: Path) -> int:
    """Restores the latest checkpoint, saves after it, and returns its number."""
    manager, path, values = restore(directory)
    assert path is not None
    number = int(Path(path).name.partition("_")[2])
    assert values == [float(number)] * 8
    manager.save(number + 1)
    manager.close()
    assert len(list(directory.iterdir())) <= 2
    return number


@pytest.mark.slow
def test_a_kill_at_the_commit_leaves_the_one_before(tmp_path: Path) -> None:
    child = run(
        "save(1); manager.sync()\n"
        "def kill(*_, **__): os.kill(os.getpid(), signal.SIGKILL)\n"
        "os.rename = os.replace = kill\n"
        "save(2); manager.sync()\n",
        tmp_path,
    )

    assert child.returncode == -signal.SIGKILL
    assert any("orbax-checkpoint-tmp" in name for name in os.listdir(tmp_path))
    assert assert_usable(tmp_path) == 1


@pytest.mark.slow
def test_a_kill_before_the_older_one_of_a_number_goes_leaves_the_newer_one(
    tmp_path: Path,
) -> None:
    child = run(
        "from armillary.checkpoint import _folder\n"
        "save(1); manager.sync()\n"
        "_folder.remove = lambda path: os.kill(os.getpid(), signal.SIGKILL)\n"
        "holder.arrays[0] = holder.arrays[0] + 6; manager.save(1); manager.sync()\n",
        tmp_path,
    )

    assert child.returncode == -signal.SIGKILL
    assert sorted(os.listdir(tmp_path)) == ["checkpoint_1", "checkpoint_1.1"]
    manager, path, values = restore(tmp_path)
    assert path == str(tmp_path / "checkpoint_1.1")
    assert values[:2] == [7.0, 7.0]
    manager.save(2)
    manager.close()
    assert sorted(os.listdir(tmp_path)) == ["checkpoint_1.1", "checkpoint_2"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ending", "returncode"),
    [("", 0), ("sys.exit(3)\n", 3), ("raise SystemExit('stop')\n", 1)],
    ids=["last line", "exit code", "exit message"],
)
def test_a_program_that_ends_right_after_save_completes_it_quietly(
    tmp_path: Path, ending: str, returncode: int
) -> None:
    child = run(f"print(save(3))\n{ending}", tmp_path)

    assert child.returncode == returncode
    assert child.stdout == f"{tmp_path / 'checkpoint_3'}\n"
    assert child.stderr == ("stop\n" if "stop" in ending else "")
    assert assert_usable(tmp_path) == 3


@pytest.mark.slow
def test_a_save_that_fails_as_the_program_ends_is_logged(tmp_path: Path) -> None:
    child = run(
        "from armillary.checkpoint._store import Store\n"
        "wait = Store.wait\n"
        "def fail(store):\n"
        "    wait(store)\n"
        "    raise OSError('No space left on device')\n"
        "Store.wait = fail\n"
        "save(3)\n",
        tmp_path,
    )

    assert "checkpoint_3` failed: OSError: No space left" in child.stderr
    assert "Traceback" not in child.stderr
