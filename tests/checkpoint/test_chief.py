"""Tests that all processes restore the same checkpoint."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jax.numpy as jnp
import pytest

from armillary.checkpoint import Checkpoint, CheckpointManager
from armillary.checkpoint._chief import decide

REPOSITORY = Path(__file__).resolve().parents[2]
PROGRAM = """
import json, sys
from types import SimpleNamespace
import jax, jax.numpy as jnp
directory, port, index = sys.argv[1], sys.argv[2], int(sys.argv[3])
jax.distributed.initialize(f"127.0.0.1:{port}", 2, index)
import armillary
from armillary.checkpoint import _reader
from armillary.errors import CheckpointError
calls = []
find_damage = _reader.find_damage
def find_and_count(folder):
    calls.append(folder.name)
    return find_damage(folder)
_reader.find_damage = find_and_count
found = []
for name in ("good", "bad"):
    holder = SimpleNamespace(array=jnp.zeros(3))
    manager = armillary.CheckpointManager(
        armillary.Checkpoint(holder=holder), f"{directory}/{name}"
    )
    try:
        found.append(manager.restore_or_initialize())
    except CheckpointError as error:
        found.append(str(error))
    found.append(holder.array.tolist())
print("RESULT", json.dumps([*found, len(calls)]), flush=True)
jax.distributed.shutdown()
"""


def save(directory: Path, *steps: int) -> None:
    for step in steps:
        holder = SimpleNamespace(array=jnp.full(3, float(step)))
        manager = CheckpointManager(Checkpoint(holder=holder), directory)
        manager.save(step)
        manager.close()


def test_one_process_decides_by_itself() -> None:
    assert decide(lambda: "good") == "good"
    assert decide(lambda: None) is None


@pytest.mark.slow
@pytest.mark.multiprocess
def test_all_processes_take_the_checkpoint_that_one_of_them_found(
    tmp_path: Path,
) -> None:
    save(tmp_path / "good", 1, 2)
    save(tmp_path / "bad", 1)
    for folder in ("good/checkpoint_2", "bad/checkpoint_1"):
        (tmp_path / folder / "manifest" / "manifest.json").unlink()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    children = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(tmp_path), str(port), str(index)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        )
        for index in range(2)
    ]
    try:
        ends = [child.communicate(timeout=120) for child in children]
    finally:
        for child in children:
            child.kill()
    assert [child.returncode for child in children] == [0, 0], ends

    # Gloo writes lines of its own to stdout.
    lines = [line for stdout, _ in ends for line in stdout.splitlines()]
    results = [json.loads(line[7:]) for line in lines if line.startswith("RESULT ")]
    (path, array, error, untouched, _), second = results
    assert path == str(tmp_path / "good" / "checkpoint_1")
    assert array == [1.0] * 3
    assert "none of its 1 checkpoints" in error
    assert untouched == [0.0] * 3
    assert second[:4] == results[0][:4]
    assert [result[4] for result in results] == [3, 0]
    assert "is damaged and was skipped" in ends[0][1]
    assert "is damaged" not in ends[1][1]
