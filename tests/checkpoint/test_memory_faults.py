"""Tests of faults while a snapshot is taken in memory, in one process."""

import errno
import os
import shutil
import threading
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from armillary.checkpoint import _writer
from armillary.checkpoint.memory import _meeting, _run_folder, _tier
from armillary.cluster._peers import ALONE
from armillary.errors import CheckpointError
from tests.checkpoint.memory import (
    find_snapshots,
    keep,
    make_state,
    open_manager,
    read,
    restore,
)
from tests.patience import patience


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
    assert f"`{memory}" in caplog.text
    _, restored = restore(tmp_path)
    assert read(restored) == expected


def test_a_memory_that_is_too_small_is_refused(tmp_path, memory, monkeypatch):
    usage = shutil.disk_usage(memory)._replace(free=100)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    manager = open_manager(make_state(1), tmp_path)

    with pytest.raises(CheckpointError, match=r"memory_directory.*MB free.*shm-size"):
        manager.save_to_memory()


def test_a_folder_that_others_can_open_is_refused(tmp_path, memory):
    folder = _run_folder.name_folder(memory, str(tmp_path / "run"))
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


def test_processes_that_the_library_does_not_know_are_refused(
    tmp_path, memory, monkeypatch
):
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    manager = open_manager(make_state(1), tmp_path)

    with pytest.raises(CheckpointError, match=r"2 processes.*Make a strategy"):
        manager.save_to_memory()
