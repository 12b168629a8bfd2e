"""Watching a directory of checkpoints: each one once, in order, until a timeout."""

import threading
import time

from armillary.controller import _watching as _watch
from armillary.controller._watching import watch_checkpoints


def watch(
    list_checkpoints,
    read_end=lambda: None,
    *,
    timeout=0.0,
    timeout_fn=None,
    should_stop=lambda: False,
):
    return watch_checkpoints(
        list_checkpoints,
        read_end,
        timeout=timeout,
        timeout_fn=timeout_fn,
        should_stop=should_stop,
    )


def test_each_checkpoint_comes_once_oldest_first():
    assert list(watch(lambda: ["1", "2", "3"])) == ["1", "2", "3"]


def test_checkpoints_written_meanwhile_are_found():
    checkpoints = ["1", "2"]
    seen = []

    for path in watch(lambda: list(checkpoints)):
        seen.append(path)
        if path == "1":
            checkpoints.append("3")

    assert seen == ["1", "2", "3"]


def test_checkpoints_deleted_meanwhile_do_not_come():
    checkpoints = ["1", "2", "3"]
    seen = []

    for path in watch(lambda: list(checkpoints)):
        seen.append(path)
        if path == "1":
            checkpoints.remove("2")

    assert seen == ["1", "3"]


def test_waits_for_a_checkpoint_until_the_timeout():
    checkpoints = []
    timer = threading.Timer(0.1, checkpoints.append, ["1"])
    timer.start()

    assert list(watch(lambda: list(checkpoints), timeout=0.4)) == ["1"]


def test_timeout_counts_from_the_last_checkpoint():
    start = time.monotonic()
    for _ in watch(lambda: ["1"], timeout=0.2):
        time.sleep(0.3)

    assert time.monotonic() - start >= 0.5


def test_timeout_function_decides_whether_to_wait_on():
    checkpoints = []
    calls = []

    def is_over():
        calls.append(None)
        if len(calls) == 2:
            checkpoints.append("1")
        return len(calls) == 3

    found = list(watch(lambda: list(checkpoints), timeout=0.01, timeout_fn=is_over))

    assert found == ["1"]
    assert len(calls) == 3


def test_the_last_checkpoint_of_a_job_that_ends_meanwhile_is_found(monkeypatch):
    monkeypatch.setattr(_watch, "_POLL_SECONDS", 0.01)
    checkpoints, ends = [], []

    def list_checkpoints():
        found = list(checkpoints)
        if not checkpoints:
            # Between this look at the directory and the next one.
            checkpoints.append("1")
            ends.append("end")
        return found

    found = watch(list_checkpoints, lambda: ends[0] if ends else None, timeout=None)
    assert list(found) == ["1"]


def test_the_end_of_an_earlier_training_does_not_count_while_another_begins(
    monkeypatch,
):
    monkeypatch.setattr(_watch, "_POLL_SECONDS", 0.01)
    # The end of the earlier training, then none, then that of the one that goes on.
    ends = ["old", "old", "old", None, None, "new"]
    checkpoints = ["1"]

    def read_end():
        if len(ends) == 3:
            checkpoints.append("2")
        return ends.pop(0) if len(ends) > 1 else ends[0]

    found = watch(lambda: list(checkpoints), read_end, timeout=None)
    assert list(found) == ["1", "2"]
    assert ends == ["new"]


def test_the_end_of_an_earlier_training_counts_if_no_other_one_begins(monkeypatch):
    monkeypatch.setattr(_watch, "_POLL_SECONDS", 0.01)
    monkeypatch.setattr(_watch, "_OLD_END_SECONDS", 0.3)
    start = time.monotonic()
    assert list(watch(lambda: ["1"], lambda: "old", timeout=None)) == ["1"]
    assert time.monotonic() - start >= 0.3


def test_stop_ends_the_watch():
    seen = []
    for path in watch(
        lambda: ["1", "2"], timeout=None, should_stop=lambda: len(seen) == 1
    ):
        seen.append(path)

    assert seen == ["1"]
