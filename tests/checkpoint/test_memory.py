"""Tests of the choice between snapshots in memory and checkpoints on the disk.

Several processes are in `tests/multiprocess/test_memory.py`.
"""

import shutil
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from armillary._launcher import SKIPPED
from armillary.checkpoint import Checkpoint, CheckpointManager, _writer
from armillary.checkpoint.memory import _tier
from armillary.errors import CheckpointMismatchError
from tests.checkpoint.memory import (
    find_snapshots,
    keep,
    make_state,
    open_manager,
    read,
    restore,
)


def test_values_in_memory_are_restored(tmp_path, memory):
    state = make_state(1)
    keep(open_manager(state, tmp_path))

    path, restored = restore(tmp_path)

    assert path is not None
    assert path.startswith(str(memory))
    assert read(restored) == read(state)
    assert restored.weights.dtype == jnp.bfloat16


def test_the_values_are_those_at_the_time_of_the_snapshot(tmp_path, memory):
    state = make_state(1)
    expected = read(state)
    manager = open_manager(state, tmp_path)
    manager.save_to_memory()
    # The memory of the old array is used again at once.
    double = jax.jit(lambda x: x * 2, donate_argnums=0)
    state.weights = double(state.weights)
    assert manager.memory is not None
    manager.memory.sync()

    _, restored = restore(tmp_path)

    assert read(restored) == expected


def test_only_the_newest_snapshot_is_kept(tmp_path, memory):
    state = make_state(1)
    manager = open_manager(state, tmp_path)
    keep(manager)
    state.step = jnp.asarray(11)
    keep(manager)

    (folder,) = memory.glob("armillary-*/process_0/*")
    _, restored = restore(tmp_path)

    assert folder.name == "snapshot_2"
    assert int(restored.step) == 11


def test_damage_in_memory_is_found_and_the_disk_is_used(tmp_path, memory, caplog):
    state = make_state(1)
    manager = open_manager(state, tmp_path)
    manager.save()
    manager.sync()
    keep(manager)
    (data,) = memory.glob("armillary-*/process_0/snapshot_1/share_0.bin")
    content = bytearray(data.read_bytes())
    content[0] ^= 1
    data.write_bytes(content)

    path, restored = restore(tmp_path)

    assert path == str(tmp_path / "run" / "checkpoint_10")
    assert read(restored) == read(state)
    assert "share_0.bin" in caplog.text
    assert "has changed" in caplog.text


def test_a_newer_checkpoint_on_the_disk_is_restored(tmp_path, memory):
    state = make_state(1)
    manager = open_manager(state, tmp_path)
    keep(manager)
    state.step = jnp.asarray(11)
    manager.save()
    manager.sync()

    path, _ = restore(tmp_path)

    assert path == str(tmp_path / "run" / "checkpoint_11")


def test_a_snapshot_during_a_save_is_newer_than_the_save(tmp_path, memory):
    state = make_state(1)
    manager = open_manager(state, tmp_path)
    manager.save()
    state.step = jnp.asarray(11)
    keep(manager)
    manager.sync()

    path, restored = restore(tmp_path)

    assert path is not None
    assert path.startswith(str(memory))
    assert int(restored.step) == 11


def test_memory_does_not_undo_the_removal_of_checkpoints(tmp_path, memory):
    state = make_state(1)
    manager = open_manager(state, tmp_path)
    for step in (11, 12):
        state.step = jnp.asarray(step)
        manager.save()
    manager.sync()
    keep(manager)
    shutil.rmtree(tmp_path / "run" / "checkpoint_12")

    path, _ = restore(tmp_path)

    assert path == str(tmp_path / "run" / "checkpoint_11")


def test_a_directory_that_is_made_again_has_nothing_in_memory(tmp_path, memory):
    keep(open_manager(make_state(1), tmp_path))
    shutil.rmtree(tmp_path / "run")

    path, _ = restore(tmp_path)

    assert path is None


def test_a_snapshot_after_which_the_program_failed_twice_is_skipped(
    tmp_path, memory, monkeypatch
):
    keep(open_manager(make_state(1), tmp_path))
    path, _ = restore(tmp_path)
    assert path is not None
    monkeypatch.setenv(SKIPPED, path)

    path, _ = restore(tmp_path)

    assert path is None


def test_values_that_do_not_fit_the_program_are_refused(tmp_path, memory):
    keep(open_manager(make_state(1), tmp_path))
    state = make_state(9)
    state.weights = jnp.zeros(4)
    manager = open_manager(state, tmp_path)

    with pytest.raises(CheckpointMismatchError, match="state/weights"):
        manager.restore_or_initialize()


def test_the_interval_is_the_time_between_snapshots(tmp_path, memory, monkeypatch):
    now = 100.0
    monkeypatch.setattr(_tier, "monotonic", lambda: now)
    manager = open_manager(make_state(1), tmp_path, memory_interval_seconds=30)

    taken: list[float] = []
    for now in (100.0, 110.0, 130.0, 150.0, 161.0):
        if manager.save_to_memory(check_interval=True):
            taken.append(now)
        assert manager.memory is not None
        manager.memory.sync()

    assert taken == [100.0, 130.0, 161.0]


def test_a_save_that_was_lost_is_due_again(tmp_path, memory):
    state = make_state(1)
    manager = open_manager(state, tmp_path, checkpoint_interval=100)
    path = manager.save()
    state.step = jnp.asarray(11)
    keep(manager)
    manager.sync()
    assert path is not None
    shutil.rmtree(path)  # as if the program had ended within the save

    manager = open_manager(state, tmp_path, checkpoint_interval=100)
    restored = manager.restore_or_initialize()

    assert restored is not None
    assert restored.endswith("snapshot_1")
    assert manager.is_due(11)


def test_a_partial_restore_makes_a_save_due(tmp_path, memory):
    state = make_state(1)
    manager = open_manager(state, tmp_path)
    manager.save()
    manager.sync()
    state.step = jnp.asarray(11)
    keep(manager)
    state = make_state(9)
    state.weights = jnp.zeros(4)

    options = {"checkpoint_interval": 100, "may_differ": "state/weights"}
    manager = open_manager(state, tmp_path, **options)
    path = manager.restore_or_initialize()

    assert path is not None
    assert path.endswith("snapshot_1")
    assert manager.is_due(11)


def test_the_best_checkpoint_is_complete_before_a_snapshot(
    tmp_path, memory, monkeypatch
):
    write_folder = _writer.write_folder

    def write_slowly(*args: Any, **options: Any) -> Callable[[], None]:
        wait = write_folder(*args, **options)

        def wait_longer() -> None:
            time.sleep(0.5)
            wait()

        return wait_longer

    monkeypatch.setattr(_writer, "write_folder", write_slowly)
    state = make_state(1)
    manager = open_manager(state, tmp_path, keep_best="accuracy", higher_is_better=True)
    assert manager.note_evaluation({"accuracy": 0.9})
    path = manager.save()

    manager.save_to_memory()

    # A run that resumes from the snapshot does not evaluate this step again.
    assert manager.checkpoints == [path]
    assert manager.best_checkpoint == path


def test_snapshots_of_earlier_programs_make_room_for_the_first_one(tmp_path, memory):
    state = make_state(1)
    keep(open_manager(state, tmp_path))
    manager = open_manager(state, tmp_path)
    manager.save()
    manager.sync()
    assert manager.restore_or_initialize() == manager.latest_checkpoint
    manager.save_to_memory()
    assert find_snapshots(memory) == {"snapshot_2"}
    assert manager.memory is not None
    manager.memory.sync()
    # A program that was killed has left a part of its next snapshot.
    (process,) = memory.glob("armillary-*/process_0")
    (process / "snapshot_7").mkdir()

    manager = open_manager(state, tmp_path)
    manager.restore_or_initialize()
    manager.save_to_memory()

    assert find_snapshots(memory) == {"snapshot_2", "snapshot_3"}


def test_snapshots_after_the_end_of_a_training_are_private(tmp_path, memory):
    state = make_state(1)
    manager = open_manager(state, tmp_path)
    keep(manager)
    manager.save()
    manager.sync()
    # As a process that an earlier job had.
    (folder,) = memory.iterdir()
    shutil.copytree(folder / "process_0", folder / "process_3")
    manager.drop_memory()
    assert list(memory.iterdir()) == []

    state.step = jnp.asarray(11)
    keep(manager)
    path, _ = restore(tmp_path)

    assert folder.stat().st_mode & 0o777 == 0o700
    assert path is not None
    assert path.startswith(str(memory))


def test_a_closed_manager_can_keep_values_again(tmp_path, memory):
    state = make_state(1)
    manager = open_manager(state, tmp_path)
    manager.save_to_memory()
    manager.close()
    path, restored = restore(tmp_path)
    assert path is not None
    assert path.endswith("snapshot_1")
    assert read(restored) == read(state)

    state.step = jnp.asarray(11)
    manager.save_to_memory()
    manager.close()

    _, restored = restore(tmp_path)
    assert read(restored) == read(state)


def test_a_program_that_only_reads_writes_nothing(tmp_path, memory):
    path, _ = restore(tmp_path)

    assert path is None
    assert not (tmp_path / "run").exists()


def test_a_snapshot_that_the_training_job_removes_meanwhile_is_not_an_error(
    tmp_path, memory, monkeypatch
):
    state = make_state(1)
    manager = open_manager(state, tmp_path)
    manager.save()
    manager.sync()
    keep(manager)
    make_source = _tier.SnapshotSource

    def remove_first(*args: Any, **options: Any) -> Any:
        for folder in memory.glob("armillary-*/process_0/snapshot_*"):
            shutil.rmtree(folder)
        return make_source(*args, **options)

    monkeypatch.setattr(_tier, "SnapshotSource", remove_first)

    # An evaluation job has the same options.
    path, restored = restore(tmp_path)

    assert path == str(tmp_path / "run" / "checkpoint_10")
    assert read(restored) == read(state)


def test_wrong_arguments_are_named(tmp_path, memory):
    checkpoint = Checkpoint(state=make_state(1))

    with pytest.raises(ValueError, match=r"memory_directory.*memory_interval_seconds="):
        CheckpointManager(checkpoint, tmp_path, memory_directory=memory)
    with pytest.raises(ValueError, match=r"memory_directory.*nowhere"):
        CheckpointManager(
            checkpoint,
            tmp_path,
            memory_interval_seconds=30,
            memory_directory=tmp_path / "nowhere",
        )
    with pytest.raises(ValueError, match=r"memory_interval_seconds.*-1"):
        CheckpointManager(checkpoint, tmp_path, memory_interval_seconds=-1)
    with pytest.raises(ValueError, match="memory_interval_seconds=30"):
        CheckpointManager(checkpoint, tmp_path).save_to_memory()
