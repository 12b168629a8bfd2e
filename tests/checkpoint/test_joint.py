"""Saving and restoring with several processes: one decides and writes, all know."""

import re
import shutil
import tempfile
from pathlib import Path
from types import SimpleNamespace

import jax.numpy as jnp
import pytest
from etils import epath
from hypothesis import given, settings
from hypothesis import strategies as st

from armillary.checkpoint import Checkpoint, CheckpointManager, _writer
from armillary.checkpoint._folder import read_checksums, write_checksums
from armillary.checkpoint._reader import verify
from armillary.checkpoint._writer import Writer
from armillary.cluster._peers import Peers
from armillary.errors import CheckpointError, PeerError
from tests.peers import Store, run_together

CONTENT = Checkpoint(x={"y": jnp.zeros(3)}).read_content()


class Recorder(Writer):
    """A writer that writes nothing, and may fail."""

    def __init__(self, peers, log, **errors):
        kept = {"max_to_keep": None, "keep_every_hours": None}
        super().__init__(epath.Path("/runs"), **kept)
        self._peers, self.log, self.errors = peers, log, errors

    def _start(self, number, content, arrays):
        self.log.append(f"start {number} {sorted(arrays)}")
        self.fail("at_start")
        return f"/runs/checkpoint_{number}"

    def _wait(self):
        self.log.append("wait")
        self.fail("at_end")

    def fail(self, when):
        if when in self.errors:
            raise self.errors[when]


def run(fn, **options):
    logs = [[], []]

    def run_one(peers):
        return fn(Recorder(peers, logs[peers.index], **options), peers)

    return run_together(run_one), logs


def save(writer, peers):
    path = writer.start(7, CONTENT)
    writer.sync()
    return path


def test_the_first_process_writes_and_all_know_the_path():
    outcomes, logs = run(save)
    assert outcomes == ["/runs/checkpoint_7"] * 2
    assert logs == [["start 7 ['x/y']", "wait"], []]


@pytest.mark.parametrize("when", ["at_start", "at_end"])
def test_an_error_of_the_first_process_is_raised_in_all(when):
    outcomes, _ = run(save, **{when: CheckpointError("no space")})
    for outcome in outcomes:
        with pytest.raises(CheckpointError, match=r"^no space$"):
            raise outcome


def test_an_error_is_known_to_all_and_ends_nothing():
    def save_twice(writer, peers):
        with pytest.raises(CheckpointError, match="no space"):
            writer.start(7, CONTENT)
        writer.errors = {}
        return writer.start(8, CONTENT)

    outcomes, _ = run(save_twice, at_start=CheckpointError("no space"))
    assert outcomes == ["/runs/checkpoint_8"] * 2


def test_another_kind_of_error_ends_the_others():
    (first, second), _ = run(save, at_start=TypeError("not so"))
    assert isinstance(first, TypeError)
    with pytest.raises(PeerError, match="process 0 of 2: TypeError: not so"):
        raise second


def test_after_a_failure_the_first_process_still_finishes_its_save():
    def save_and_fail(writer, peers):
        writer.start(7, CONTENT)
        peers.fail(ValueError("something else"))
        writer.sync()

    outcomes, logs = run(save_and_fail)
    assert outcomes == [None, None]
    assert logs == [["start 7 ['x/y']", "wait"], []]


class Lost:
    """A state that cannot be read any more."""

    def get_state(self):
        raise OSError("the disk is gone")

    def set_state(self, state):
        raise AssertionError


def test_a_state_that_one_process_cannot_read_is_told_to_the_others(
    tmp_path, monkeypatch
):
    store = Store()
    peers = Peers(store, 1, 2, 10.0)
    monkeypatch.setattr(_writer, "get_peers", lambda: peers)
    manager = CheckpointManager(Checkpoint(lost=Lost()), tmp_path / "run")
    with pytest.raises(OSError, match="the disk is gone"):
        manager.save(1)
    with pytest.raises(PeerError, match="process 1 of 2: OSError: the disk is gone"):
        Peers(store, 0, 2, 10.0).gather("a save", "")


def save_steps(directory: Path, *steps: int) -> epath.Path:
    holder = SimpleNamespace(array=jnp.zeros(3))
    manager = CheckpointManager(Checkpoint(holder=holder), directory)
    for step in steps:
        manager.save(step)
    manager.close()
    return epath.Path(directory)


@pytest.mark.parametrize("has_chosen", [True, False])
def test_a_directory_that_only_some_see_is_an_error_of_all(tmp_path, has_chosen):
    full = save_steps(tmp_path / "full", 6)
    empty = epath.Path(tmp_path / "empty")

    def run(peers):
        directory = full if (peers.index == 0) == has_chosen else empty
        chosen = directory / "checkpoint_6" if has_chosen else None
        verify(chosen, directory, peers)

    named, nothing = "checkpoint_6 (`checksums", "nothing, in "
    shown = (named, nothing) if has_chosen else (nothing, named)
    for outcome in run_together(run):
        with pytest.raises(CheckpointError, match="do not see the same") as caught:
            raise outcome
        assert f"process 0 of 2: {shown[0]}" in str(caught.value)
        assert f"process 1 of 2: {shown[1]}" in str(caught.value)
        assert f", in {full}" in str(caught.value)
        assert f", in {empty}" in str(caught.value)


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    """Returns a directory with a checkpoint."""
    return Path(save_steps(tmp_path_factory.mktemp("saved"), 6))


def verify_views(saved: Path, count: int, change) -> list:
    """Verifies a checkpoint of which each process sees a view of its own."""
    with tempfile.TemporaryDirectory() as folder:
        views = [epath.Path(folder) / str(index) for index in range(count)]
        for index, view in enumerate(views):
            shutil.copytree(saved, view)
            change(index, Path(view / "checkpoint_6"))

        def run(peers):
            view = views[peers.index]
            return verify(view / "checkpoint_6", view, peers)

        return run_together(run, count)


DAMAGES = {
    "flipped": lambda file: file.write_bytes(bytes([file.read_bytes()[0] ^ 1])),
    "longer": lambda file: file.write_bytes(file.read_bytes() + b"x"),
    "deleted": lambda file: file.unlink(),
}


@settings(max_examples=15, deadline=None)
@given(data=st.data(), blind=st.sets(st.integers(0, 2)))
def test_what_one_process_finds_damaged_is_damaged_for_all(saved, data, blind):
    sums = read_checksums(epath.Path(saved) / "checkpoint_6")
    name = data.draw(st.sampled_from([*sorted(sums), "checksums.json"]))
    damage = DAMAGES[data.draw(st.sampled_from(sorted(DAMAGES)))]

    def change(index: int, view: Path) -> None:
        if index in blind:
            damage(view / name)

    (said,) = set(verify_views(saved, 3, change))
    if not blind:
        assert said is None
        return
    assert f"`{name}`" in said
    # What all find is told once, unless it says where each has looked.
    for index in range(3) if len(blind) < 3 else ():
        assert (f"in process {index} of 3, " in said) == (index in blind)


def test_another_content_with_sums_of_its_own_is_another_checkpoint(saved):
    def change(index: int, view: Path) -> None:
        if index:
            manifest = view / "manifest" / "manifest.json"
            manifest.write_text(manifest.read_text() + " ")
            write_checksums(epath.Path(view))

    for outcome in verify_views(saved, 2, change):
        with pytest.raises(CheckpointError, match="do not see the same") as caught:
            raise outcome
        sums = re.findall(r"process \d of 2: .*json` (#\w+)\), in", str(caught.value))
        assert len(set(sums)) == 2
