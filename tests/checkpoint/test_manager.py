"""Tests of saving and restoring with a `CheckpointManager`."""

import itertools
import os
import sys
import threading
import time
import types
from pathlib import Path

import jax.numpy as jnp
import pytest

from armillary import _rising_clock
from armillary.checkpoint import Checkpoint, CheckpointManager, _commit, _writer
from armillary.checkpoint._folder import find_checkpoints
from tests.patience import patience


class Counter:
    """A step and an array that tells which step it was saved at."""

    def __init__(self) -> None:
        self.step = 0
        self.array = jnp.zeros(3)

    def set(self, step: int) -> None:
        self.step = step
        self.array = jnp.full(3, float(step))


def names(manager: CheckpointManager) -> list[str]:
    return [Path(path).name for path in manager.checkpoints]


def save_steps(manager: CheckpointManager, counter: Counter, *steps: int) -> None:
    for step in steps:
        counter.set(step)
        manager.save(step)
    manager.sync()


def test_only_the_newest_are_kept_in_the_order_of_saving(make_manager):
    counter = Counter()
    manager = make_manager(Checkpoint(counter=counter), max_to_keep=3)
    save_steps(manager, counter, 10, 9, 200, 30)

    assert names(manager) == ["checkpoint_9", "checkpoint_200", "checkpoint_30"]
    assert manager.latest_checkpoint == str(Path(manager.directory) / "checkpoint_30")
    assert sorted(os.listdir(manager.directory)) == sorted(names(manager))


def test_a_second_manager_leaves_the_save_that_the_first_still_writes(
    make_manager, monkeypatch
):
    may_end = threading.Event()
    sync_tree = _commit.sync_tree

    def wait(folder):
        assert may_end.wait(patience(60))
        sync_tree(folder)

    monkeypatch.setattr(_commit, "sync_tree", wait)
    first = make_manager(Checkpoint(counter=Counter()))
    second = make_manager(Checkpoint(counter=Counter()))
    first.save(1)
    thread = threading.Thread(target=second.save, args=(2,))
    thread.start()
    time.sleep(0.5)  # It would remove the folder by now.
    may_end.set()
    thread.join()
    first.sync()
    second.sync()

    assert names(second) == ["checkpoint_1", "checkpoint_2"]


def set_clock(monkeypatch, wall, monotonic):
    """Sets the clocks of what is written, and no others."""
    clocks = types.SimpleNamespace(time=wall, monotonic=monotonic)
    monkeypatch.setattr(_rising_clock, "time", clocks)


def test_a_new_manager_continues_with_the_same_retention(make_manager, monkeypatch):
    hours = iter(range(1000))
    set_clock(monkeypatch, lambda: 3600.0 * next(hours), time.monotonic)
    counter = Counter()
    managers = [
        make_manager(
            Checkpoint(counter=counter),
            max_to_keep=2,
            keep_checkpoint_every_n_hours=4,
        )
        for _ in range(4)
    ]
    for i, manager in enumerate(managers):
        save_steps(manager, counter, *range(3 * i, 3 * i + 3))

    *kept, _, _ = find_checkpoints(managers[-1]._directory)
    times = [entry.saved_at / 3600 for entry in kept]
    assert len(times) >= 2
    assert all(b - a >= 4 for a, b in zip([0, *times], times, strict=False))
    assert names(managers[-1])[-2:] == ["checkpoint_10", "checkpoint_11"]


@pytest.mark.parametrize("later", [None, 1000])
def test_a_later_run_with_other_hours_keeps_what_was_kept_for_good(
    make_manager, monkeypatch, later
):
    hours = iter(range(1000))
    set_clock(monkeypatch, lambda: 3600.0 * next(hours), time.monotonic)
    counter = Counter()
    first = make_manager(
        Checkpoint(counter=counter), max_to_keep=2, keep_checkpoint_every_n_hours=4
    )
    # It is decided with the last save that checkpoint 7 is kept for good.
    save_steps(first, counter, *range(10))
    kept = names(first)[:-2]
    assert kept == ["checkpoint_3", "checkpoint_7"]

    second = make_manager(
        Checkpoint(counter=counter), max_to_keep=2, keep_checkpoint_every_n_hours=later
    )
    save_steps(second, counter, *range(10, 14))

    assert names(second) == [*kept, "checkpoint_12", "checkpoint_13"]


def test_hours_count_where_the_clock_is_set_back(make_manager, monkeypatch):
    """As on a machine that starts with a wrong time, and corrects it after a save."""
    counter = Counter()
    hour, hours_ahead = 0.0, 8760.0
    set_clock(monkeypatch, lambda: 3600 * (hour + hours_ahead), lambda: 3600 * hour)
    manager = make_manager(
        Checkpoint(counter=counter), max_to_keep=1, keep_checkpoint_every_n_hours=4
    )
    for step in range(1, 12):
        hour += 1
        save_steps(manager, counter, step)
        hours_ahead = 8760.0 if step < 2 else 0.0

    assert names(manager) == ["checkpoint_4", "checkpoint_8", "checkpoint_11"]


def test_other_content_of_the_directory_is_not_touched(make_manager, tmp_path):
    foreign = {
        "events.out.tfevents.1": "events",
        "train/events": "events",
        "checkpoint_1/data": "another library",
        "checkpoint_9.orbax-checkpoint-tmp": "a file",
        "best/checkpoint_4/header": "user",
    }
    for name, text in foreign.items():
        path = tmp_path / "run" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    counter = Counter()
    manager = make_manager(Checkpoint(counter=counter), max_to_keep=1)
    save_steps(manager, counter, 1, 2, 3)

    assert names(manager) == ["checkpoint_3"]
    for name, text in foreign.items():
        assert (tmp_path / "run" / name).read_text() == text


def test_numbers_count_on_without_a_step_counter(make_manager):
    manager = make_manager(Checkpoint(counter=Counter()))
    manager.save()
    manager.save()
    manager.sync()
    other = make_manager(Checkpoint(counter=Counter()))
    other.save()
    other.sync()

    assert names(other) == ["checkpoint_1", "checkpoint_2", "checkpoint_3"]


def test_the_interval_counts_from_the_last_save_or_restore(make_manager):
    counter = Counter()
    kwargs = {"step_counter": lambda: counter.step, "checkpoint_interval": 10}
    manager = make_manager(Checkpoint(counter=counter), **kwargs)
    saved = []
    for step in range(4, 40, 4):
        counter.set(step)
        if manager.save(check_interval=True):
            saved.append(step)

    assert saved == [4, 16, 28]
    assert manager.checkpoint_interval == 10
    assert manager.save() is not None
    manager.sync()

    other = make_manager(Checkpoint(counter=counter), **kwargs)
    other.restore_or_initialize()
    counter.set(45)
    assert other.save(check_interval=True) is None
    counter.set(46)
    assert other.save(check_interval=True) is not None


@pytest.mark.parametrize(
    ("waited", "written", "interval"),
    [
        pytest.param(0.0, 0.0, 20, id="no more often than every 10 s"),
        pytest.param(0.25, 2.0, 50, id="1 % is waited for"),
        pytest.param(0.01, 60.0, 1200, id="10 % is written"),
    ],
)
def test_an_interval_is_chosen_by_what_a_save_costs(
    make_manager, monkeypatch, waited, written, interval
):
    counter, seconds_per_step, calls = Counter(), 0.5, itertools.count()

    def monotonic() -> float:
        now = counter.step * seconds_per_step
        if threading.current_thread() is not threading.main_thread():
            return now + written
        return now + waited * (next(calls) > 0)

    monkeypatch.setattr(_writer, "monotonic", monotonic)
    manager = make_manager(
        Checkpoint(counter=counter),
        step_counter=lambda: counter.step,
        checkpoint_interval="auto",
    )
    for step in (10, 20):
        assert manager.checkpoint_interval == 1
        calls = itertools.count()
        save_steps(manager, counter, step)
    assert manager.checkpoint_interval == interval
    assert [manager.is_due(20 + n) for n in (interval - 1, interval)] == [False, True]
    # As of a run that went back.
    save_steps(manager, counter, 15)
    assert manager.checkpoint_interval == interval


def test_one_tracker_knows_which_step_the_latest_checkpoint_holds(make_manager):
    counter = Counter()
    checkpoint = Checkpoint(counter=counter)
    manager = make_manager(checkpoint, step_counter=lambda: counter.step)
    assert not manager.has_saved_step()
    save_steps(manager, counter, 1, 2)
    assert manager.has_saved_step()
    assert not manager.has_saved_step(checkpoint_number=3)

    counter.step = 3
    assert not manager.has_saved_step()
    manager.save(checkpoint_number=30)
    manager.sync()
    assert manager.has_saved_step(checkpoint_number=30)
    assert not manager.has_saved_step()

    first, _, last = manager.checkpoints
    manager.restore(first)
    assert not manager.has_saved_step()
    manager.restore(last)
    assert manager.has_saved_step()
    without_counter = make_manager(checkpoint)
    without_counter.save(3)
    assert not without_counter.has_saved_step()


def test_the_newest_is_stepped_over_if_the_launcher_says_so(
    make_manager, monkeypatch, caplog
):
    counter = Counter()
    manager = make_manager(Checkpoint(counter=counter))
    save_steps(manager, counter, 3)
    only = manager.latest_checkpoint
    monkeypatch.setenv("ARMILLARY_SKIPPED_CHECKPOINT", only)
    # There is no other one, and a run never starts from scratch next to it.
    assert manager.restore_or_initialize() == only
    save_steps(manager, counter, 7)
    newest = manager.latest_checkpoint
    assert manager.restore_or_initialize() == newest
    monkeypatch.setenv("ARMILLARY_SKIPPED_CHECKPOINT", newest)
    assert manager.restore_or_initialize() == only
    assert f"`{newest}` is skipped, but not removed" in caplog.text
    assert manager.checkpoints == [only, newest]
    assert manager.restore(newest) == newest


@pytest.mark.parametrize(
    ("directory", "error", "text"),
    [
        (
            "s3://bucket/run",
            ValueError,
            r"'s3://bucket/run', but Orbax writes .*`gs://`",
        ),
        ("gs://bucket/run", ImportError, r"`gcsfs`, .* Install the extra `gcs`"),
    ],
)
def test_an_object_store_that_cannot_be_used_is_refused(
    monkeypatch, directory, error, text
):
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    checkpoint = Checkpoint(state={"x": jnp.zeros(3)})
    with pytest.raises(error, match=text) as raised:
        CheckpointManager(checkpoint, directory)
    assert "`directory" in str(raised.value)
    with pytest.raises(error, match=text) as raised:
        checkpoint.save(directory)
    assert "`file_prefix" in str(raised.value)
