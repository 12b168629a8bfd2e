"""Tests of file permissions, and that reading a checkpoint runs no code."""

import os
import pickle
import re
import shutil
import stat
from pathlib import Path
from types import SimpleNamespace

import jax.numpy as jnp

import armillary

REPOSITORY = Path(__file__).resolve().parents[2]


class Trap:
    """Makes a folder when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self.path),)


def test_files_have_the_rights_that_the_user_gives_and_are_never_unpickled(tmp_path):
    run_dir = tmp_path / "run"
    holder = SimpleNamespace(array=jnp.ones(1000))
    manager = armillary.CheckpointManager(
        armillary.Checkpoint(holder=holder), run_dir / "checkpoints"
    )
    summaries = armillary.summary.SummaryManager(run_dir / "summaries")
    before = os.umask(0o027)
    try:
        manager.save(1)
        manager.close()
        summaries.write_summaries({"loss": 1.0, "inner": {"loss": 2.0}}, step=1)
        summaries.close()
    finally:
        os.umask(before)

    paths = [run_dir, *run_dir.rglob("*")]
    assert len([path for path in paths if "tfevents" in path.name]) == 2
    for path in paths:
        mode = stat.S_IMODE(path.stat().st_mode)
        assert mode == (0o750 if path.is_dir() else 0o640), f"{path} has {mode:o}"

    good = run_dir / "checkpoints" / "checkpoint_1"
    bad = Path(shutil.copytree(good, good.with_name("checkpoint_2")))
    trap = pickle.dumps(Trap(tmp_path / "trapped"))
    for folder in (good, good / "manifest", bad, bad / "arrays"):
        for name in ("data.pkl", "checkpoint", "state.pickle"):
            (folder / name).write_bytes(trap)
    for path in bad.rglob("*"):
        if path.is_file() and path.parent.name != "header":
            path.write_bytes(trap)
    holder.array = jnp.zeros(1000)
    assert manager.restore_or_initialize() == str(good)
    assert holder.array.sum() == 1000
    assert not (tmp_path / "trapped").exists()
    pickle.loads(trap)
    assert (tmp_path / "trapped").exists()


RUNS_WHAT_IT_READS = re.compile(
    r"(pickle|dill|marshal|shelve|joblib)\.(?!dumps|register)\w"
    r"|from (pickle|cloudpickle|dill|marshal|shelve|joblib) "
    r"|import (pickle as|cloudpickle|dill|marshal|shelve|joblib)"
    r"|(?<![.\w`])(eval|exec)\(|allow_pickle"
)


def test_the_library_neither_unpickles_nor_evaluates():
    files = (REPOSITORY / "armillary").rglob("*.py")
    found = {p.parent.name for p in files if RUNS_WHAT_IT_READS.search(p.read_text())}

    # Functions that a program sends to its own workers, over an authenticated cluster.
    assert found == {"parameter_server"}
