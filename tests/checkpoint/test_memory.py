"""Tests of snapshots in memory, in one process; several are in `tests/multiprocess`."""

import errno
import os
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import armillary
from armillary._launcher import SKIPPED
from armillary.checkpoint import Checkpoint, CheckpointManager
from armillary.checkpoint.memory import _room, _tier
from armillary.errors import CheckpointError, CheckpointMismatchError
from tests.checkpoint import soak_program as program
from tests.problems import Holder

STEPS = 24


@pytest.fixture
def memory(tmp_path) -> Path:
    folder = tmp_path / "memory"
    folder.mkdir()
    return folder


def make_state(seed: int) -> Holder:
    rng = np.random.default_rng(seed)
    return Holder(
        weights=jnp.asarray(rng.normal(size=(5, 3)), jnp.bfloat16),
        scalar=jnp.asarray(seed),
        key=jax.random.key(seed),
        nibbles=jnp.asarray(rng.integers(0, 15, 7)).astype(jnp.uint4),
        tiny=jnp.asarray([seed, 0.5], "float8_e4m3"),
        empty=jnp.zeros((0, 2)),
        step=jnp.asarray(10 * seed),
    )


def read(state: Holder) -> dict[str, list[float]]:
    values = dict(vars(state))
    values["key"] = jax.random.key_data(values["key"])
    return {name: np.asarray(each).tolist() for name, each in values.items()}


def open_manager(state: Holder, tmp_path: Path, **options) -> CheckpointManager:
    return CheckpointManager(
        Checkpoint(state=state),
        tmp_path / "run",
        step_counter=lambda: int(state.step),
        memory_interval_seconds=options.pop("memory_interval_seconds", 60),
        memory_directory=tmp_path / "memory",
        **options,
    )


def keep(manager: CheckpointManager) -> None:
    """Keeps the values in memory, and waits until they are complete."""
    assert manager.memory is not None
    manager.save_to_memory()
    manager.memory.sync()


def restore(tmp_path: Path, **options) -> tuple[str | None, Holder]:
    """Restores into another state, as the next program does."""
    state = make_state(9)
    path = open_manager(state, tmp_path, **options).restore_or_initialize()
    return path, state


def find_files(memory: Path) -> list[Path]:
    return sorted(path for path in memory.rglob("*") if path.is_file())


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


def test_a_snapshot_that_was_interrupted_is_not_used(tmp_path, memory, monkeypatch):
    state = make_state(1)
    manager = open_manager(state, tmp_path)
    keep(manager)
    expected = read(state)
    state.step = jnp.asarray(11)
    # The description is written last, so a process that ends before leaves none.
    monkeypatch.setattr(_tier, "describe_share", lambda *_: None)
    manager.save_to_memory()

    path, restored = restore(tmp_path)

    assert path is not None
    assert path.endswith("snapshot_1")
    assert read(restored) == expected


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


def test_a_failed_snapshot_leaves_the_last_one(tmp_path, memory, monkeypatch, caplog):
    state = make_state(1)
    manager = open_manager(state, tmp_path)
    keep(manager)
    expected = read(state)
    state.step = jnp.asarray(11)

    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, "no space")

    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", fail)
        keep(manager)

    assert "No snapshot was taken in memory at step 11" in caplog.text
    assert "no space" in caplog.text
    _, restored = restore(tmp_path)
    assert read(restored) == expected


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


def test_a_memory_that_is_too_small_is_refused(tmp_path, memory, monkeypatch):
    usage = shutil.disk_usage(memory)._replace(free=100)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    manager = open_manager(make_state(1), tmp_path)

    with pytest.raises(CheckpointError, match=r"memory_directory.*MB free.*shm-size"):
        manager.save_to_memory()


def test_a_folder_that_others_can_open_is_refused(tmp_path, memory):
    folder = _room.name_folder(memory, str(tmp_path / "run"))
    folder.mkdir(mode=0o755)
    folder.chmod(0o755)
    manager = open_manager(make_state(1), tmp_path)

    with pytest.raises(CheckpointError, match=r"other users.*memory_directory"):
        manager.restore_or_initialize()


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


class Stop(Exception):  # noqa: N818
    pass


def train(
    tmp_path: Path, stop_at: int | None = None, **options
) -> tuple[int, dict[str, object]]:
    """Trains up to a step, or fails before.

    Returns:
        The step at the start, and the final state.
    """
    trainer = program.Trainer(armillary.OneDeviceStrategy("cpu:0"), STEPS)
    manager = CheckpointManager(
        Checkpoint(trainer=trainer, data=trainer.train_dataset),
        tmp_path / "run",
        checkpoint_interval=8,
        **options,
    )

    def act(_: object) -> None:
        if manager.memory is not None:
            manager.memory.sync()
        if stop_at is not None and int(trainer.optimizer.step[...]) >= stop_at:
            raise Stop

    controller = program.make_controller(trainer, manager, train_actions=[act])
    start = int(trainer.optimizer.step[...])
    controller.train(STEPS)
    return start, program.describe(trainer)


def test_a_run_continues_from_memory_bit_for_bit(tmp_path, memory):
    _, expected = train(tmp_path / "whole")
    options = {"memory_interval_seconds": 1e-9, "memory_directory": memory}

    with pytest.raises(Stop):
        train(tmp_path, stop_at=20, **options)
    start, found = train(tmp_path, **options)

    # The last save on the disk was at step 12, and the last snapshot at step 16.
    assert start == 16
    assert found == expected
    # The disk has the last step.
    assert find_files(memory) == []
