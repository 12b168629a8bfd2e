"""Tests of snapshots in memory in several processes, of which some are lost."""

import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from armillary.checkpoint.memory import _run_folder
from tests.multiprocess import joint_saves, memory
from tests.multiprocess.conftest import Outcome, run_program

pytestmark = pytest.mark.slow


def run(
    folder: Path, scenario: str, processes: int, kept: Path, *, is_shared: bool
) -> Outcome:
    program = Path(memory.__file__)
    return run_program(
        program,
        folder,
        scenario,
        processes,
        2,
        run_dir=str(kept / "run"),
        memory=str(kept / "memory"),
        is_shared=is_shared,
    )


def keep(folder: Path, *, is_shared: bool) -> tuple[Path, list[Any]]:
    outcome = run(folder, "keeps", 4, folder, is_shared=is_shared)
    assert outcome.codes == [0] * 4, outcome.log
    return folder, outcome.results


@pytest.fixture(scope="module")
def shared(tmp_path_factory) -> tuple[Path, list[Any]]:
    """A snapshot of four processes on one machine, and their results."""
    return keep(tmp_path_factory.mktemp("shared"), is_shared=True)


@pytest.fixture(scope="module")
def apart(tmp_path_factory) -> tuple[Path, list[Any]]:
    """A snapshot of four processes with a memory of their own, and their results."""
    return keep(tmp_path_factory.mktemp("apart"), is_shared=False)


def test_each_process_keeps_its_share_and_one_copy(shared):
    folder, results = shared
    values = joint_saves.make_values(1)
    chief = 4 * memory.CHIEF_SIZE
    total = sum(value.nbytes for value in values.values()) + chief

    sizes = [sorted(each["sizes"].values()) for each in results]

    assert all(len(each) == 2 for each in sizes)
    assert sum(sum(each) for each in sizes) == pytest.approx(2 * total, rel=0.05)
    # One array lies whole on all devices, and one process keeps it.
    whole = values["whole"].nbytes
    even = (total - whole - chief) / 4
    assert max(max(each) for each in sizes) < even + whole + chief + 100_000
    folders = list(folder.glob("memory/armillary-*/process_*/*"))
    assert {each.name for each in folders} == {"snapshot_2"}


def test_a_closed_manager_has_no_thread(shared):
    _, results = shared

    for each in results:
        assert "armillary-lifeline" in each["threads"]
        assert "armillary-memory" not in each["threads"]


@pytest.mark.parametrize("processes", [1, 2, 3, 4, 6])
def test_any_number_of_processes_restores_a_snapshot_of_four(
    shared, tmp_path, processes
):
    folder, results = shared
    kept = shutil.copytree(folder, tmp_path / "kept")
    move_memory(folder, kept)

    outcome = run(tmp_path, "restores", processes, kept, is_shared=True)

    assert outcome.codes == [0] * processes, outcome.log
    assert {each["name"] for each in outcome.results} == {"snapshot_2"}
    check_values(outcome, results[0]["kept"])


def check_values(outcome: Outcome, kept: dict[str, str]) -> None:
    """Checks that all processes have the values that process 0 has kept."""
    assert outcome.results[0]["restored"] == kept
    # One array lies in process 0 alone.
    others = {name: digest for name, digest in kept.items() if name != "chief"}
    for each in outcome.results[1:]:
        assert each["restored"] == others


def move_memory(folder: Path, kept: Path) -> None:
    """Gives the memory of a copy the name that belongs to its directory."""
    for parent in {kept / "memory", *kept.glob("memory/machine_*")}:
        old = _run_folder.name_folder(parent, str(folder / "run"))
        if old.exists():
            old.rename(_run_folder.name_folder(parent, str(kept / "run")))


@pytest.mark.parametrize("lost", [0, 2])
def test_a_process_is_lost_with_its_memory(apart, tmp_path, lost):
    folder, results = apart
    kept = shutil.copytree(folder, tmp_path / "kept")
    move_memory(folder, kept)
    shutil.rmtree(kept / "memory" / f"machine_{lost}")

    outcome = run(tmp_path, "restores", 4, kept, is_shared=False)

    assert outcome.codes == [0] * 4, outcome.log
    assert {each["name"] for each in outcome.results} == {"snapshot_2"}
    check_values(outcome, results[0]["kept"])
    # There is nothing on the disk, so the values came from the other processes.
    assert outcome.results[lost]["received"] > 0
    assert not list((kept / "run").glob("checkpoint_*"))


def test_fewer_machines_restore_what_is_left(apart, tmp_path):
    folder, results = apart
    kept = shutil.copytree(folder, tmp_path / "kept")
    move_memory(folder, kept)
    shutil.rmtree(kept / "memory" / "machine_3")

    outcome = run(tmp_path, "restores", 3, kept, is_shared=False)

    assert outcome.codes == [0] * 3, outcome.log
    assert {each["name"] for each in outcome.results} == {"snapshot_2"}
    check_values(outcome, results[0]["kept"])


def test_a_share_that_is_lost_with_its_copy_is_named(apart, tmp_path):
    folder, _ = apart
    kept = shutil.copytree(folder, tmp_path / "kept")
    move_memory(folder, kept)
    for lost in (1, 2):
        shutil.rmtree(kept / "memory" / f"machine_{lost}")

    outcome = run(tmp_path, "restores", 4, kept, is_shared=False)

    assert outcome.codes == [0] * 4, outcome.log
    assert {each["name"] for each in outcome.results} == {None}
    assert "in memory lacks 1 of 4 shares" in outcome.errors[0]


def test_a_damaged_share_is_read_from_its_copy(apart, tmp_path):
    folder, results = apart
    kept = shutil.copytree(folder, tmp_path / "kept")
    move_memory(folder, kept)
    (data,) = kept.glob("memory/machine_1/armillary-*/process_1/*/share_1.bin")
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 1
    data.write_bytes(content)

    outcome = run(tmp_path, "restores", 4, kept, is_shared=False)

    assert outcome.codes == [0] * 4, outcome.log
    check_values(outcome, results[0]["kept"])
    assert "share_1.bin` has changed" in outcome.errors[0]


def test_shares_of_an_earlier_job_are_not_mixed_with_newer_ones(apart, tmp_path):
    first, _ = apart
    second = tmp_path / "second"
    options = {"is_shared": False, "seed": 3}
    outcome = run_program(
        Path(memory.__file__),
        tmp_path,
        "keeps",
        4,
        2,
        run_dir=str(first / "run"),
        memory=str(second / "memory"),
        **options,
    )
    assert outcome.codes == [0] * 4, outcome.log
    # Process 0 runs on a machine on which process 1 ran, and its machine is lost. The
    # machine of process 1 comes back from an earlier job.
    shutil.rmtree(second / "memory" / "machine_0")
    (second / "memory" / "machine_1").rename(second / "memory" / "machine_0")
    shutil.copytree(first / "memory" / "machine_1", second / "memory" / "machine_1")
    shutil.copytree(first / "run", second / "run")
    for machine in (second / "memory").iterdir():
        old = _run_folder.name_folder(machine, str(first / "run"))
        old.rename(_run_folder.name_folder(machine, str(second / "run")))

    again = run(tmp_path, "restores", 4, second, is_shared=False)

    assert again.codes == [0] * 4, again.log
    for each, kept in zip(again.results, outcome.results, strict=True):
        assert each["restored"] == kept["kept"]


def test_all_processes_skip_the_snapshot_that_process_0_skips(apart, tmp_path):
    folder, _ = apart
    kept = shutil.copytree(folder, tmp_path / "kept")
    move_memory(folder, kept)
    chief = _run_folder.name_folder(kept / "memory" / "machine_0", str(kept / "run"))

    outcome = run_program(
        Path(memory.__file__),
        tmp_path,
        "restores",
        4,
        2,
        run_dir=str(kept / "run"),
        memory=str(kept / "memory"),
        is_shared=False,
        skipped=str(chief / "snapshot_2"),
    )

    assert outcome.codes == [0] * 4, outcome.log
    assert {each["name"] for each in outcome.results} == {None}


def test_a_process_without_room_for_a_copy_is_named(tmp_path):
    outcome = run(tmp_path, "is_full", 3, tmp_path, is_shared=False)

    assert outcome.codes == [0] * 3, outcome.log
    assert "No snapshot was taken in memory" in outcome.errors[0]
    assert re.search(
        r"in process [02], process 1 at `\S+`: .*No space left on device",
        outcome.errors[0],
    )
    outcome = run(tmp_path, "restores", 3, tmp_path, is_shared=False)
    assert outcome.codes == [0] * 3, outcome.log
    assert {each["name"] for each in outcome.results} == {"snapshot_1"}


def test_a_process_that_dies_within_a_snapshot_leaves_the_last_one(tmp_path):
    outcome = run(tmp_path, "is_killed", 4, tmp_path, is_shared=False)
    assert outcome.codes[1] == -9, outcome.log
    shutil.rmtree(tmp_path / "memory" / "machine_1")

    outcome = run(tmp_path, "restores", 4, tmp_path, is_shared=False)

    assert outcome.codes == [0] * 4, outcome.log
    assert {each["name"] for each in outcome.results} == {"snapshot_1"}
