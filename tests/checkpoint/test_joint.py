"""Tests of saving and restoring with several processes, of which one writes."""

import re
import shutil
import tempfile
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from etils import epath
from hypothesis import given, settings
from hypothesis import strategies as st

from armillary.checkpoint import Checkpoint, CheckpointManager, _leaves, _writer
from armillary.checkpoint._checksums import read_checksums, write_checksums
from armillary.checkpoint._reader import verify
from armillary.checkpoint._writer import Writer, agree_on
from armillary.errors import CheckpointError, PeerError
from tests.patience import wait_until
from tests.peers import make_peers, run_together


def test_all_processes_raise_the_error_of_a_save_and_other_errors_end_them():
    def run(error):
        def fail():
            raise error

        return run_together(lambda peers: agree_on("a save", fail, peers))

    for outcome in run(CheckpointError("no space")):
        with pytest.raises(CheckpointError, match=r"^no space$"):
            raise outcome
    first, second = run(TypeError("not so"))
    assert isinstance(first, TypeError)
    with pytest.raises(PeerError, match="process 0 of 2: TypeError: not so"):
        raise second


def test_after_a_failure_the_first_process_still_finishes_its_save():
    waited = []

    def run(peers):
        writer = Writer(epath.Path("/runs"), None, None)
        writer._peers, writer._is_saving = peers, True
        writer._wait = lambda: waited.append(peers.index)
        peers.announce_failure(ValueError("something else"))
        writer.sync()

    assert run_together(run) == [None, None]
    # The other process waits only for its own part.
    assert sorted(waited) == [0, 1]


class Lost:
    """A state that cannot be read any more."""

    def get_state(self):
        raise OSError("the disk is gone")

    def set_state(self, state):
        raise AssertionError


def test_a_state_that_one_process_cannot_read_is_sent_to_the_others(
    tmp_path, monkeypatch
):
    chief, peers = make_peers()
    monkeypatch.setattr(_writer, "get_peers", lambda: peers)
    manager = CheckpointManager(Checkpoint(lost=Lost()), tmp_path / "run")
    with pytest.raises(OSError, match="the disk is gone"):
        manager.save(1)
    with pytest.raises(PeerError, match="process 1 of 2: OSError: the disk is gone"):
        chief.gather("a save", "")


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    """Returns a directory with a checkpoint."""
    directory = tmp_path_factory.mktemp("saved")
    manager = CheckpointManager(Checkpoint(holder={"x": jnp.zeros(3)}), directory)
    manager.save(6)
    manager.close()
    return directory


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
def test_a_checkpoint_that_one_process_finds_damaged_is_damaged_for_all(
    saved, data, blind
):
    sums = read_checksums(epath.Path(saved) / "checkpoint_6")
    name = data.draw(st.sampled_from([*sorted(sums), "checksums.json"]))
    damage = DAMAGES[data.draw(st.sampled_from(sorted(DAMAGES)))]

    def change(index: int, view: Path) -> None:
        if index in blind:
            damage(view / name)

    (message,) = set(verify_views(saved, 3, change))
    if not blind:
        assert message is None
        return
    assert f"`{name}`" in message
    # Damage that all find is reported once, unless the text names the process.
    for index in range(3) if len(blind) < 3 else ():
        assert (f"in process {index} of 3, " in message) == (index in blind)


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


def test_processes_share_files_out_only_if_they_see_the_same_ones(tmp_path):
    directory = tmp_path / "run"
    checkpoint = Checkpoint(holder={"x": jnp.zeros((1024, 1024))})
    manager = CheckpointManager(checkpoint, directory)
    manager.save(6)
    manager.close()

    def damage(index: int, view: Path) -> None:
        if index == 1:
            files = [path for path in (view / "arrays").rglob("*") if path.is_file()]
            largest = max(files, key=lambda file: file.stat().st_size)
            data = bytearray(largest.read_bytes())
            data[len(data) // 2] ^= 1
            largest.write_bytes(data)

    # Process 0 would verify the file for both, in a copy of its own.
    (message,) = set(verify_views(directory, 2, damage))
    assert message is not None
    assert "in process 1 of 2, the content of `arrays/" in message


def test_a_part_that_does_not_come_names_its_process():
    def receive(peers):
        if peers.index == 0:
            wait_until(lambda: 1 in peers._lifeline.read_parts("a save"))
            return peers.receive_parts("a save")
        if peers.index == 1:
            peers.send_part("a save", "done")
        return None

    first, *_ = run_together(receive, 3, timeout_seconds=0.2)
    with pytest.raises(PeerError, match="Process 2 of 3 has not sent its part"):
        raise first


def test_an_array_without_a_part_in_process_0_is_refused():
    chief, other = make_peers()
    elsewhere = SimpleNamespace(addressable_shards=[], shape=(3, 5))
    assert _leaves._as_part(elsewhere, other) is None
    with pytest.raises(ValueError, match=r"shape \(3, 5\) lies on no device"):
        _leaves._as_part(elsewhere, chief)


def test_a_program_that_joins_processes_itself_needs_a_strategy(tmp_path, monkeypatch):
    checkpoint = Checkpoint(holder={"x": jnp.zeros(3)})
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(jax, "process_count", lambda: 4)
    for save in (
        lambda: CheckpointManager(checkpoint, tmp_path).save(1),
        lambda: checkpoint.save(tmp_path / "ckpt"),
    ):
        with pytest.raises(CheckpointError, match=r"joined 4 processes.*a strategy"):
            save()
    assert not list(tmp_path.iterdir())
