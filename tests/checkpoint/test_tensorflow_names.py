"""Tests of `save`, `write`, `restore` and their status, as in TensorFlow's guides."""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from armillary.checkpoint import Checkpoint, latest_checkpoint
from armillary.errors import CheckpointDamageError, CheckpointError
from armillary.errors import CheckpointMismatchError as MismatchError


class Encoder(nnx.Module):
    def __init__(self, seed):
        self.layer = nnx.Linear(2, 3, rngs=nnx.Rngs(seed))


class Classifier(nnx.Module):
    def __init__(self, seed):
        self.encoder = Encoder(seed)
        self.head = nnx.Linear(3, 2, rngs=nnx.Rngs(seed))

    @property
    def checkpoint_items(self):
        return {"encoder": self.encoder}


def kernel(encoder):
    return np.asarray(encoder.layer.kernel[...])


def test_save_counts_and_restore_brings_back_what_was_saved(tmp_path):
    value = {"x": jnp.arange(3.0)}
    checkpoint = Checkpoint(value=value)
    first = checkpoint.save(tmp_path / "run" / "ckpt")
    value["x"] = jnp.zeros(3)
    second = checkpoint.save(str(tmp_path / "run" / "ckpt"))
    assert first == str(tmp_path / "run" / "ckpt-1")
    assert second == str(tmp_path / "run" / "ckpt-2")

    report = checkpoint.restore(first)
    assert report.assert_consumed() is report
    np.testing.assert_array_equal(value["x"], [0, 1, 2])
    checkpoint.restore(second)
    np.testing.assert_array_equal(value["x"], [0, 0, 0])


def test_write_makes_one_folder_and_overwrites_none(tmp_path):
    value = {"x": jnp.ones(2)}
    path = Checkpoint(value=value).write(tmp_path / "pretrained")
    assert path == str(tmp_path / "pretrained")
    value["x"] = jnp.zeros(2)
    with pytest.raises(CheckpointError, match=r"exists.*`checkpoint\.save\(prefix\)`"):
        Checkpoint(value=value).write(path)
    Checkpoint(value=value).read(path)
    np.testing.assert_array_equal(value["x"], [1, 1])


def test_the_line_of_the_bert_tutorial_reads_a_part_of_a_checkpoint(tmp_path):
    pretrained = Encoder(seed=0)
    other = nnx.Linear(1, 1, rngs=nnx.Rngs(0))
    path = Checkpoint(encoder=pretrained, masked_lm=other).write(tmp_path / "bert")
    model = Classifier(seed=1)
    assert not np.array_equal(kernel(model.encoder), kernel(pretrained))

    status = Checkpoint(**model.checkpoint_items).read(path)
    status.expect_partial().assert_existing_objects_matched()
    np.testing.assert_array_equal(kernel(model.encoder), kernel(pretrained))
    with pytest.raises(
        MismatchError, match=r"(?s)masked_lm/bias.*`expect_partial\(\)`"
    ):
        status.assert_consumed()


def test_values_that_were_not_restored_fail_the_assertion(tmp_path):
    path = Checkpoint(encoder=Encoder(0)).write(tmp_path / "encoder")
    model = Encoder(1)
    status = Checkpoint(encoder=model).read(path, skip="encoder/layer/bias")
    with pytest.raises(MismatchError, match="not restored:\n  encoder/layer/bias\n"):
        status.assert_existing_objects_matched()
    with pytest.raises(MismatchError, match="that were not"):
        status.assert_consumed()


def test_without_a_checkpoint_restore_starts_from_scratch(tmp_path):
    value = {"x": jnp.ones(2)}
    assert latest_checkpoint(tmp_path / "nowhere") is None
    status = Checkpoint(value=value).restore(latest_checkpoint(tmp_path))
    assert not status.restored and status.kept == ("value/x",)
    assert str(status.expect_partial()) == "There was no checkpoint to restore."
    with pytest.raises(MismatchError, match="no checkpoint to restore"):
        status.assert_existing_objects_matched()


def test_the_latest_checkpoint_may_be_one_of_a_manager(tmp_path, make_manager):
    checkpoint = Checkpoint(value={"x": jnp.ones(2)})
    manager = make_manager(checkpoint, tmp_path, max_to_keep=1)
    by_hand = checkpoint.save(tmp_path / "checkpoint")
    assert latest_checkpoint(tmp_path) == by_hand

    saved = manager.save(7)
    manager.sync()
    assert latest_checkpoint(tmp_path) == saved
    again = checkpoint.save(tmp_path / "checkpoint")
    assert latest_checkpoint(str(tmp_path)) == again

    # A manager neither counts nor removes what it did not save.
    assert manager.checkpoints == [saved]
    manager.save(8)
    manager.sync()
    names = {each.name for each in tmp_path.iterdir()}
    assert names == {"checkpoint-1", "checkpoint-2", "checkpoint_8"}


def test_a_manager_restores_what_was_written_under_its_name(tmp_path, make_manager):
    value = {"x": jnp.ones(2)}
    checkpoint = Checkpoint(value=value)
    path = checkpoint.write(tmp_path / "checkpoint_5")
    value["x"] = jnp.zeros(2)
    manager = make_manager(checkpoint, tmp_path)
    assert manager.restore_or_initialize() == path
    np.testing.assert_array_equal(value["x"], [1, 1])


def test_a_changed_file_is_found(tmp_path):
    checkpoint = Checkpoint(value={"x": jnp.ones(2)})
    path = checkpoint.save(tmp_path / "ckpt")
    manifest = next((tmp_path / "ckpt-1" / "manifest").iterdir())
    manifest.write_bytes(manifest.read_bytes()[:-1] + b" ")
    with pytest.raises(CheckpointDamageError, match="manifest"):
        checkpoint.restore(path)


def test_a_save_that_fails_leaves_nothing(tmp_path):
    (tmp_path / "file").write_text("in the way")
    checkpoint = Checkpoint(value={"x": jnp.ones(2)})
    with pytest.raises(CheckpointError, match=r"Saving .* failed.*Make room"):
        checkpoint.save(tmp_path / "file" / "ckpt")
    assert [each.name for each in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("method", ["save", "write"])
def test_a_path_is_needed(method):
    checkpoint = Checkpoint(value={"x": jnp.ones(2)})
    with pytest.raises(TypeError, match="`file_prefix` is 3"):
        getattr(checkpoint, method)(3)
    with pytest.raises(TypeError, match="`directory` is 3"):
        latest_checkpoint(3)
