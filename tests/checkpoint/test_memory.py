"""Tests of snapshots in memory, in one process; several are in `tests/multiprocess`."""

import errno
import os
import shutil
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import armillary
from armillary._launcher import SKIPPED
from armillary.checkpoint import Checkpoint, CheckpointManager, _writer
from armillary.checkpoint.memory import _meeting, _room, _share, _tier
from armillary.checkpoint.memory._offer import find_keepers
from armillary.cluster._peers import ALONE
from armillary.errors import CheckpointError, CheckpointMismatchError
from tests.checkpoint import soak_program as program
from tests.patience import patience
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


def test_a_failed_save_does_not_make_a_snapshot_newer_than_the_next_save(
    tmp_path, memory, monkeypatch
):
    state = make_state(1)
    manager = open_manager(state, tmp_path)

    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.EIO, "the disk is away")

    with monkeypatch.context() as patch:
        patch.setattr(_writer, "write_folder", fail)
        with pytest.raises(CheckpointError, match="the disk is away"):
            manager.save()
    state.step = jnp.asarray(11)
    keep(manager)
    # It has the serial number of the save that failed.
    state.step = jnp.asarray(12)
    manager.save()
    manager.sync()

    path, _ = restore(tmp_path)

    assert path == str(tmp_path / "run" / "checkpoint_12")


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


def find_snapshots(memory: Path) -> set[str]:
    return {path.name for path in memory.glob("armillary-*/process_*/*")}


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


def test_an_interrupted_copy_is_not_used(tmp_path, memory, monkeypatch, caplog):
    state = make_state(1)
    manager = open_manager(state, tmp_path)
    keep(manager)
    state.step = jnp.asarray(11)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(_tier, "write_parts", interrupt)
        with pytest.raises(KeyboardInterrupt):
            manager.save_to_memory()
    assert manager.memory is not None
    manager.memory.sync()

    assert "No snapshot was taken in memory at step 11" in caplog.text
    path, _ = restore(tmp_path)
    assert path is not None
    assert path.endswith("snapshot_1")


def test_an_exchange_before_a_snapshot_does_not_end_it(tmp_path, memory, monkeypatch):
    manager = open_manager(make_state(1), tmp_path)
    assert manager.save_to_memory(check_interval=True)
    assert manager.memory is not None
    manager.memory.sync()
    may_end = threading.Event()
    complete = manager.memory._complete

    def complete_later(*args: Any) -> None:
        may_end.wait(patience(60))
        complete(*args)

    monkeypatch.setattr(manager.memory, "_complete", complete_later)
    ALONE.boundary.exchange("something else", Other().answer)
    manager.save_to_memory()

    try:
        assert not manager.save_to_memory(check_interval=True)
        assert find_snapshots(memory) == {"snapshot_1", "snapshot_2"}
    finally:
        may_end.set()
    manager.memory.sync()
    assert find_snapshots(memory) == {"snapshot_2"}


class Other:
    """Another part of an exchange."""

    def answer(self) -> str:
        return "yes"


def test_a_disk_that_does_not_answer_costs_a_snapshot(
    tmp_path, memory, monkeypatch, caplog
):
    manager = open_manager(make_state(1), tmp_path)

    def fail(*_: object) -> None:
        raise OSError(errno.ESTALE, "stale file handle")

    keep(manager)
    with monkeypatch.context() as patch:
        patch.setattr(_meeting, "find_checkpoints", fail)
        keep(manager)

    assert "No snapshot was taken in memory at step 10" in caplog.text
    assert "stale file handle" in caplog.text
    path, _ = restore(tmp_path)
    assert path is not None
    assert path.endswith("snapshot_1")


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


def test_memory_is_dropped_only_after_a_save_that_succeeded(
    tmp_path, memory, monkeypatch
):
    write_folder = _writer.write_folder

    def write_badly(*args: Any, **options: Any) -> Callable[[], None]:
        wait = write_folder(*args, **options)

        def wait_and_fail() -> None:
            wait()
            raise OSError(errno.ENOSPC, "no space")

        return wait_and_fail

    manager = open_manager(make_state(1), tmp_path)
    keep(manager)
    monkeypatch.setattr(_writer, "write_folder", write_badly)
    manager.save()

    with pytest.raises(CheckpointError, match="no space"):
        manager.drop_memory()

    assert find_snapshots(memory) == {"snapshot_1"}


def test_machines_of_equal_names_are_different(tmp_path, monkeypatch):
    monkeypatch.setattr(socket, "gethostname", lambda: "localhost")
    names: set[str] = set()
    for text in ("a", "b"):
        file = tmp_path / text
        file.write_text(f"{text}\n")
        monkeypatch.setattr(_room, "_BOOT_FILE", file)
        names.add(_room.find_machine())

    assert names == {"a", "b"}
    monkeypatch.setattr(_room, "_BOOT_FILE", tmp_path / "missing")
    assert _room.find_machine() == "localhost"


@pytest.mark.parametrize("dtype", [">f4", "<f4", ">i8", "int4", "float8_e4m3fn"])
def test_parts_of_any_dtype_are_read_as_they_were(tmp_path, dtype):
    array = np.array([[1, 2, 3], [0, -1, -2]]).astype(jnp.dtype(dtype))
    box = _share.Box((0, 0), (2, 3))
    file = tmp_path / "share_0.bin"

    (part,) = _share.write_parts(file, {("x", box): array.T.copy().T})
    found = _share.read_array(file.read_bytes(), part)

    np.testing.assert_array_equal(found.astype(float), array.astype(float))
    assert found.dtype == array.dtype.newbyteorder("=")


def test_processes_that_the_library_does_not_know_are_refused(
    tmp_path, memory, monkeypatch
):
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    manager = open_manager(make_state(1), tmp_path)

    with pytest.raises(CheckpointError, match=r"2 processes.*Make a strategy"):
        manager.save_to_memory()


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


def test_values_before_the_first_loop_are_not_kept(tmp_path, memory):
    options = {"memory_interval_seconds": 1e-9, "memory_directory": memory}
    with pytest.raises(Stop):
        train(tmp_path, stop_at=16)

    with pytest.raises(Stop):
        train(tmp_path, stop_at=0, **options)

    # The launcher would not find that the same checkpoint has failed again.
    assert find_files(memory) == []


def test_two_trainings_in_one_program_continue_from_memory(tmp_path, memory):
    _, expected = train(tmp_path / "whole")
    options = {"memory_interval_seconds": 1e-9, "memory_directory": memory}
    trainer = program.Trainer(armillary.OneDeviceStrategy("cpu:0"), STEPS)
    manager = CheckpointManager(
        Checkpoint(trainer=trainer, data=trainer.train_dataset),
        tmp_path / "run",
        checkpoint_interval=100,
        **options,
    )

    def act(_: object) -> None:
        assert manager.memory is not None
        manager.memory.sync()
        if int(trainer.optimizer.step[...]) >= 20:
            raise Stop

    controller = program.make_controller(trainer, manager, train_actions=[act])
    controller.train(8)
    with pytest.raises(Stop):
        controller.train(STEPS)

    start, found = train(tmp_path, **options)

    assert start == 16
    assert found == expected


@given(st.lists(st.sampled_from("ABCD"), min_size=1, max_size=12))
def test_copies_are_on_another_machine_if_there_is_one_for_each(machines):
    keepers = find_keepers(machines)

    assert sorted(keepers) == list(range(len(machines)))
    if len(machines) > 1:
        assert all(keeper != index for index, keeper in enumerate(keepers))
    if max(map(machines.count, machines)) <= len(machines) / 2:
        for index, keeper in enumerate(keepers):
            assert machines[keeper] != machines[index]
