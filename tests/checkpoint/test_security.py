"""Tests of who may read what is written, and of what reading may run."""

import os
import pickle
import re
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
PROGRAM = """
import os, sys
os.umask(int(sys.argv[2], 8))
from types import SimpleNamespace
import jax.numpy as jnp
import armillary
holder = SimpleNamespace(array=jnp.ones(1000))
manager = armillary.CheckpointManager(
    armillary.Checkpoint(holder=holder), sys.argv[1] + "/run/checkpoints", max_to_keep=1
)
for step in range(2):
    manager.save(step)
manager.close()
summaries = armillary.summary.SummaryManager(sys.argv[1] + "/run/summaries")
summaries.write_summaries({"loss": 1.0, "inner": {"loss": 2.0}}, step=1)
summaries.close()
"""
RESTORE = """
import sys
events = []
sys.addaudithook(lambda name, args: events.append(name))
from types import SimpleNamespace
import jax.numpy as jnp
import armillary
holder = SimpleNamespace(array=jnp.zeros(1000))
manager = armillary.CheckpointManager(
    armillary.Checkpoint(holder=holder), sys.argv[1]
)
del events[:]
print(manager.restore_or_initialize(), float(holder.array.sum()))
assert "open" in events
print(events.count("pickle.find_class"))
"""


def run(code: str, *arguments: str) -> list[str]:
    child = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        check=True,
        timeout=120,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
    )
    return child.stdout.splitlines()


@pytest.mark.slow
@pytest.mark.parametrize("umask", ["022", "027"])
def test_files_have_the_rights_that_the_user_gives(tmp_path: Path, umask: str) -> None:
    run(PROGRAM, str(tmp_path), umask)

    paths = [tmp_path / "run", *(tmp_path / "run").rglob("*")]
    assert len([path for path in paths if "tfevents" in path.name]) == 2
    assert any(path.name == "checksums.json" for path in paths)
    forbidden = int(umask, 8)
    for path in paths:
        mode = stat.S_IMODE(path.stat().st_mode)
        expected = 0o777 if path.is_dir() else 0o666
        assert mode == expected & ~forbidden, f"{path} has {mode:o}"


class Trap:
    """Makes a folder when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self.path),)


@pytest.mark.slow
def test_restoring_never_unpickles(tmp_path: Path) -> None:
    run(PROGRAM, str(tmp_path), "022")
    directory = tmp_path / "run" / "checkpoints"
    good = directory / "checkpoint_1"
    bad = Path(shutil.copytree(good, directory / "checkpoint_2"))
    trap = pickle.dumps(Trap(tmp_path / "trapped"))
    for folder in (good, good / "manifest", bad, bad / "arrays"):
        for name in ("data.pkl", "checkpoint", "state.pickle"):
            (folder / name).write_bytes(trap)
    for path in bad.rglob("*"):
        if path.is_file() and path.parent.name != "header":
            path.write_bytes(trap)

    restored, unpickled = run(RESTORE, str(directory))

    assert restored == f"{good} 1000.0"
    assert unpickled == "0"
    assert not (tmp_path / "trapped").exists()
    pickle.loads(trap)
    assert (tmp_path / "trapped").exists()


RUNS_WHAT_IT_READS = re.compile(
    r"(pickle|dill|marshal|shelve|joblib)\.(?!dumps|register)\w"
    r"|from (pickle|cloudpickle|dill|marshal|shelve|joblib) "
    r"|import (pickle as|cloudpickle|dill|marshal|shelve|joblib)"
    r"|(?<![.\w`])(eval|exec)\(|allow_pickle"
)


def test_the_library_neither_unpickles_nor_evaluates() -> None:
    files = (REPOSITORY / "armillary").rglob("*.py")
    found = {p.parent.name for p in files if RUNS_WHAT_IT_READS.search(p.read_text())}

    # Functions that a program sends to its own workers, over an authenticated cluster.
    assert found == {"parameter_server"}
