"""Tests that each process writes and reads its own part of a checkpoint."""

import re
import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from etils import epath

import armillary
from armillary.checkpoint import _checksums
from armillary.cluster import ExitCode
from tests.multiprocess import joint_saves
from tests.multiprocess.conftest import Outcome, run_program

pytestmark = pytest.mark.slow


def run(folder: Path, scenario: str, processes: int, **options: Any) -> Outcome:
    program = Path(joint_saves.__file__)
    return run_program(program, folder, scenario, processes, 2, **options)


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> tuple[Path, list[Any]]:
    """Returns a directory that four processes have saved to, and their results."""
    folder = tmp_path_factory.mktemp("saved")
    outcome = run(folder, "saves", 4, run_dir=str(folder / "run"))
    assert outcome.codes == [0] * 4, outcome.log
    return folder / "run", outcome.results


def test_each_process_writes_its_share(saved):
    _, results = saved
    values = joint_saves.make_values(1)
    total = sum(value.nbytes for value in values.values())

    written = [each["bytes"] for each in results]

    assert sum(written) == pytest.approx(total, rel=0.05)
    assert max(written) <= 1.1 * total / 4


@pytest.mark.parametrize("processes", [1, 2, 4, 6])
def test_any_number_of_processes_reads_what_four_have_written(
    saved, tmp_path, processes
):
    directory, results = saved
    copy = shutil.copytree(directory, tmp_path / "run")
    if processes == 1:
        check_one_process(copy, results[0]["saved"])
        return

    outcome = run(tmp_path, "restores", processes, run_dir=str(copy))

    assert outcome.codes == [0] * processes, outcome.log
    for each in outcome.results:
        assert each["name"] == "checkpoint_2"
        assert each["restored"] == results[0]["saved"]
        assert each["spec"] == ["fsdp"]
    check_verified(directory, [each["verified"] for each in outcome.results])
    # The file belongs to process 3 of the save, and one process has verified it.
    (error,) = {each["error"] for each in outcome.results}
    assert re.match(
        rf"CheckpointDamageError: .*in process \d of {processes}, the content of "
        r"`arrays/ocdbt.process_3/d/\w+` has changed",
        error,
    )
    assert "is damaged and was skipped" in outcome.errors[0]


def check_one_process(directory: Path, expected: dict[str, str]) -> None:
    strategy = armillary.ShardedStrategy({"fsdp": 4}, devices=jax.devices()[:4])
    state = joint_saves.make_state(strategy, joint_saves.make_values(9))
    checkpoint = armillary.Checkpoint(state=state)
    armillary.CheckpointManager(checkpoint, directory).restore_or_initialize()
    assert joint_saves.digest(state) == expected


def check_verified(directory: Path, verified: list[int]) -> None:
    """Each large file is verified once, and no process verifies much more than others.

    Small files are verified by all.
    """
    sums = _checksums.read_checksums(epath.Path(directory / "checkpoint_2"))
    sizes = np.array([size for size, _ in sums.values()])
    large = sizes[sizes > _checksums._LARGE_BYTES]
    small = sizes[sizes <= _checksums._LARGE_BYTES].sum()
    count = len(verified)
    assert large.sum() <= sum(verified) <= large.sum() + 3 * count * small
    most = -(-len(large) // count) * large.max()
    assert max(verified) <= most + 3 * small


def test_a_save_that_fails_in_one_process_fails_in_all_and_costs_no_checkpoint(
    tmp_path,
):
    outcome = run(tmp_path, "fails", 3, run_dir=str(tmp_path / "run"))

    assert outcome.codes == [0] * 3, outcome.log
    found = outcome.results[0]
    assert all(each == found for each in outcome.results)
    assert found["first"] is None
    for name, reason in (
        ("write", r".*File too large"),
        ("copy", "MemoryError: no memory for a copy"),
        (
            "elsewhere",
            r"a file was written that process 0 does not see as it is: "
            r"`arrays/ocdbt.process_1/.*` is missing. .*that all processes share",
        ),
    ):
        pattern = (
            rf"(?s)CheckpointError: Saving `.*2` failed: in process 1 of 3, {reason}"
        )
        assert re.match(pattern, found[name]), found[name]
        assert "earlier checkpoints are unchanged" in found[name]
    assert found["after"] is None
    assert found["names"] == ["checkpoint_1", "checkpoint_3"]
    assert found["restored"][0] == "checkpoint_3"


@pytest.mark.parametrize(
    ("at", "newest"),
    [
        ("write", "checkpoint_1"),
        ("before the report", "checkpoint_1"),
        ("after the report", None),
        ("commit", "checkpoint_1"),
    ],
)
def test_a_process_that_dies_in_a_save_costs_no_earlier_checkpoint(
    tmp_path, at, newest
):
    run_dir = tmp_path / "run"
    outcome = run(tmp_path / "first", "dies", 3, run_dir=str(run_dir), at=at)
    victim = 0 if at == "commit" else 1
    for index, code in enumerate(outcome.codes):
        expected = -9 if index == victim else ExitCode.RESTART_REQUESTED
        assert code == expected, outcome.log

    # Any number of processes continues.
    again = run(tmp_path / "second", "resumes", 2, run_dir=str(run_dir))

    assert again.codes == [0, 0], again.log
    found = again.results[0]
    assert all(each == found for each in again.results)
    assert found["name"] in ([newest] if newest else ["checkpoint_1", "checkpoint_2"])
    seed = int(found["name"].removeprefix("checkpoint_"))
    strategy = armillary.ShardedStrategy({"fsdp": 4}, devices=jax.devices()[:4])
    state = joint_saves.make_state(strategy, joint_saves.make_values(seed))
    assert found["restored"] == joint_saves.digest(state)
    assert (found["left"], found["error"], found["again"]) == ([], None, "checkpoint_7")
