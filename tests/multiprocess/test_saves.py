"""Tests that a save or restore that fails in one process fails in all."""

import re
from pathlib import Path

import pytest

from tests.multiprocess.conftest import run_job

pytestmark = pytest.mark.slow


def test_all_processes_raise_the_same_error_of_a_save_or_a_restore(tmp_path: Path):
    run_dir = tmp_path / "runs"
    outcome = run_job(tmp_path, "saves", processes=2, devices=1, run_dir=str(run_dir))
    assert outcome.codes == [0, 0], outcome.log
    first, second = outcome.results

    # Each reads the files, and all take what nobody finds damaged.
    looked_at = [f"checkpoint_{number}" for number in (2, 1, 1, 1)]
    assert first["looked at"] == looked_at
    assert first == second
    assert first["good"] == str(run_dir / "good" / "checkpoint_1")
    assert "is damaged and was skipped" in outcome.errors[0]
    assert "is damaged" not in outcome.errors[1]
    assert "all of its 1 checkpoints are damaged" in first["bad"]
    assert "a damaged checkpoint: " in first["by name"]
    changed = "in process 1 of 2, the content of `manifest/manifest.json` has changed"
    assert f"a damaged checkpoint: {changed}" in first["moved, by name"]
    assert f"is damaged and was skipped: {changed}" in outcome.errors[0]
    assert first["moved"] == "checkpoint_1"
    newest = r"checkpoint_2 \(`checksums.json` #\w+\), in /"
    for index in (0, 1):
        assert re.search(f"process {index} of 2: {newest}", first["stale"])
    for index, (one, other) in enumerate(
        [("checkp", "nothing"), ("nothing", "checkp")]
    ):
        text = first[f"only {index} sees it"]
        assert text.startswith("CheckpointError: The processes do not see the same")
        assert f"process 0 of 2: {one}" in text
        assert f"process 1 of 2: {other}" in text

    assert "none_0', which is not a complete checkpoint" in first["no folder"]
    assert "do not see the same" in first["another folder"]
    assert f", in {run_dir}/bad" in first["another folder"]
    assert f", in {run_dir}/good" in first["another folder"]

    assert first["best"] == [False] * 5 + ["checkpoint_4", 1]

    # Process 0 alone could not write, and what follows is as if nothing had been.
    assert "checkpoint_3` failed: FileExistsError" in first["start"]
    assert first["after start"] == [str(run_dir / "run" / "checkpoint_3"), 1]
    assert "checkpoint_4` failed" in first["late"]
    assert "File too large" in first["late"]
    assert first["after late"] == [str(run_dir / "run" / "checkpoint_5"), 2]

    by_hand = [str(run_dir / "by_hand" / f"ckpt-{number}") for number in (1, 2)]
    assert first["by hand"] == [*by_hand, by_hand[1], True]
    assert f"`path` is {by_hand[0]!r}, which exists" in first["by hand, twice"]

    error, step, names = first["trained"]
    # It is raised by the first that looks: the action of the next loop.
    assert error.startswith(f"CheckpointError: Saving `{run_dir}/failing/checkpoint_6`")
    assert (step, names) == (9, ["checkpoint_3"])
    assert "WARNING: process" not in outcome.errors[1], outcome.errors[1]
