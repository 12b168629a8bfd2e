"""Saving with several processes: one writes, all know."""

import jax.numpy as jnp
import pytest
from etils import epath

from armillary.checkpoint._checkpoint import Content
from armillary.checkpoint._joint import JointWriter, check_same_path
from armillary.errors import CheckpointError
from tests.peers import run_together

CONTENT = Content({"x": jnp.zeros(3)}, {})


class Recorder:
    """A writer that writes nothing, and may fail."""

    def __init__(self, log, start_error=None, sync_error=None, warning=None):
        self.log, self.start_error, self.sync_error = log, start_error, sync_error
        self.last_error = None if warning is None else CheckpointError(warning)

    def start(self, number, content):
        self.log.append(f"start {number} {sorted(content.leaves)}")
        if self.start_error:
            raise CheckpointError(self.start_error)
        if self.last_error is not None:
            return None
        return str(epath.Path("/runs") / f"checkpoint_{number}")

    def sync(self):
        self.log.append("sync")
        if self.sync_error:
            raise CheckpointError(self.sync_error)

    def close(self):
        self.log.append("close")


def run(fn, **errors):
    logs = [[], []]

    def run_one(peers):
        return fn(JointWriter(Recorder(logs[peers.index], **errors), peers), peers)

    return run_together(run_one), logs


def test_the_first_process_writes_and_all_know_the_path():
    def save(writer, peers):
        path = writer.start(7, CONTENT)
        writer.sync()
        writer.close()
        return path

    outcomes, logs = run(save)
    assert outcomes == ["/runs/checkpoint_7"] * 2
    assert logs == [["start 7 ['x']", "sync", "close"], ["close"]]


@pytest.mark.parametrize("where", ["start_error", "sync_error"])
def test_an_error_of_the_first_process_is_raised_in_all(where):
    def save(writer, peers):
        writer.start(7, CONTENT)
        writer.sync()

    (first, second), _ = run(save, **{where: "no space"})
    with pytest.raises(CheckpointError, match=r"^no space$"):
        raise first
    with pytest.raises(CheckpointError, match=r"no space .Process 0 could not write"):
        raise second


def test_all_know_of_a_save_that_failed_where_training_goes_on():
    def save(writer, peers):
        path = writer.start(7, CONTENT)
        writer.sync()
        return path, str(writer.last_error), writer.has_failed

    outcomes, _ = run(save, warning="no space")
    assert outcomes == [(None, "no space", False)] * 2


def test_after_a_failure_the_first_process_still_finishes_its_save():
    def save(writer, peers):
        writer.start(7, CONTENT)
        peers.fail(ValueError("something else"))
        writer.sync()

    outcomes, logs = run(save)
    assert outcomes == [None, None]
    assert logs[0] == ["start 7 ['x']", "sync"]


def test_processes_that_restored_different_checkpoints_say_so():
    def restore(peers):
        check_same_path("/runs/checkpoint_7", peers)
        check_same_path(None if peers.index else "/runs/checkpoint_7", peers)

    for outcome in run_together(restore):
        with pytest.raises(CheckpointError, match="different checkpoints") as caught:
            raise outcome
        assert "process 0 of 2: /runs/checkpoint_7" in str(caught.value)
        assert "process 1 of 2: no checkpoint" in str(caught.value)


def test_one_process_has_nobody_to_compare_with():
    check_same_path("/runs/checkpoint_7", None)
