"""`Checkpoint.read`: parts of a checkpoint go into another program, the rest stays."""

import logging

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from armillary.checkpoint import Checkpoint, _reader
from armillary.errors import (
    CheckpointDamageError,
    CheckpointError,
    CheckpointMismatchError,
)
from tests.mistakes import mistakes


class Position:
    def __init__(self, index=0):
        self.index = index

    def get_state(self):
        return {"index": self.index}

    def set_state(self, state):
        if state["index"] < 0:
            raise RuntimeError("no such position")
        self.index = state["index"]


class Net(nnx.Module):
    def __init__(self, seed, num_classes, width=8):
        rngs = nnx.Rngs(seed)
        self.backbone = nnx.Linear(16, width, rngs=rngs)
        self.head = nnx.Linear(width, num_classes, rngs=rngs)


class Other(nnx.Module):
    """The same backbone under another name."""

    def __init__(self, seed):
        rngs = nnx.Rngs(seed)
        self.encoder = nnx.Linear(16, 8, rngs=rngs)
        self.classifier = nnx.Linear(8, 2, rngs=rngs)


def read(model):
    return jax.tree.map(np.array, nnx.to_pure_dict(nnx.state(model)))


def assert_same(actual, expected):
    jax.tree.map(np.testing.assert_array_equal, actual, expected)


@pytest.fixture
def saved(make_manager, tmp_path):
    """Returns a pretrained model and where it was saved with all that belongs to it."""
    model = Net(0, num_classes=10)
    optimizer = nnx.Optimizer(model, optax.sgd(0.1, momentum=0.9), wrt=nnx.Param)
    checkpoint = Checkpoint(model=model, optimizer=optimizer, data=Position(7))
    manager = make_manager(checkpoint, tmp_path / "pretraining")
    path = manager.save(5)
    manager.sync()
    return model, path


def test_a_model_alone_is_read_for_inference(saved, monkeypatch):
    pretrained, path = saved
    asked = []
    read_arrays = _reader.read_arrays
    monkeypatch.setattr(
        _reader,
        "read_arrays",
        lambda folder, shardings: (
            asked.extend(shardings) or read_arrays(folder, shardings)
        ),
    )
    model = Net(1, num_classes=10)
    report = Checkpoint(model=model).read(path)
    assert_same(read(model), read(pretrained))
    # Nothing else is even looked at.
    assert sorted(asked) == list(report.restored)
    assert len(asked) == 4
    assert (report.path, report.kept, report.differences) == (path, (), ())


def test_a_backbone_goes_into_a_model_with_another_head(saved, caplog):
    pretrained, path = saved
    model = Net(1, num_classes=2)
    head = read(model)["head"]
    with caplog.at_level(logging.INFO, logger="armillary"):
        report = Checkpoint(model=model).read(path, only="model/backbone")
    now = read(model)
    assert_same(now["backbone"], read(pretrained)["backbone"])
    assert_same(now["head"], head)
    assert report.kept == ("model/head/bias", "model/head/kernel")
    assert report.unused[:3] == ("data", "model/head/bias", "model/head/kernel")
    assert [record.levelname for record in caplog.records] == ["INFO"]
    text = str(report)
    assert text in caplog.text
    assert text.startswith(
        f"A part of {path}:\n"
        "2 restored:\n  model/backbone/bias\n  model/backbone/kernel\n"
        "2 of the program, left as they were:\n"
        "  model/head/bias\n  model/head/kernel\n"
        f"{len(report.unused)} of the checkpoint, not used:\n  data\n"
    )


@pytest.mark.parametrize(
    "selection",
    [
        {"skip": "model/head"},
        {"only": ["model/backbone/kernel", "model/backbone/bias/"]},
        {"only": "model", "skip": ["model/head/bias", "model/head/kernel"]},
        {"may_differ": "model/head"},
        {"may_differ": ["nothing", "model/head"]},
    ],
)
def test_ways_to_leave_a_head_out(saved, selection):
    pretrained, path = saved
    model = Net(1, num_classes=2)
    head = read(model)["head"]
    report = Checkpoint(model=model).read(path, **selection)
    assert report.restored == ("model/backbone/bias", "model/backbone/kernel")
    assert_same(read(model)["backbone"], read(pretrained)["backbone"])
    assert_same(read(model)["head"], head)
    assert len(report.differences) == (2 if "may_differ" in selection else 0)


def test_a_part_that_may_differ_is_taken_whole_or_not_at_all(saved):
    _, path = saved
    model = Net(1, num_classes=10)
    model.head.scale = nnx.Param(jnp.ones(()))
    before = read(model)["head"]
    report = Checkpoint(model=model).read(path, may_differ="model/head")
    assert_same(read(model)["head"], before)
    assert report.differences == (
        "+ model/head/scale: float32 ()  only in the program",
    )


def test_a_dictionary_gives_an_object_the_path_of_the_checkpoint(saved):
    pretrained, path = saved
    model, position = Other(1), Position()
    classifier = read(model)["classifier"]
    checkpoint = Checkpoint(model={"backbone": model.encoder}, data=position)
    report = checkpoint.read(path, only=["model/backbone", "data"])
    assert position.index == 7
    assert_same(read(model)["encoder"], read(pretrained)["backbone"])
    assert_same(read(model)["classifier"], classifier)
    assert report.restored == ("data", "model/backbone/bias", "model/backbone/kernel")
    assert (report.kept, len(report.unused)) == ((), 7)


def test_a_run_begins_with_a_part_and_goes_on_with_its_own(saved, make_manager):
    pretrained, path = saved
    model, step = Net(1, num_classes=2), {"value": jnp.zeros((), jnp.int32)}
    checkpoint = Checkpoint(model=model, step=step)
    manager = make_manager(
        checkpoint,
        step_counter=lambda: step["value"],
        init_fn=lambda: checkpoint.read(path, only="model/backbone"),
    )
    assert manager.restore_or_initialize() is None
    assert_same(read(model)["backbone"], read(pretrained)["backbone"])
    assert not manager.has_saved_step()
    model.backbone.kernel[...] = jnp.ones((16, 8))
    own = manager.save()
    model.backbone.kernel[...] = jnp.zeros((16, 8))
    assert manager.restore_or_initialize() == own
    np.testing.assert_array_equal(model.backbone.kernel[...], np.ones((16, 8)))


def test_a_state_that_refuses_undoes_all(make_manager, tmp_path):
    weights = {"w": jnp.ones(3)}
    checkpoint = Checkpoint(weights=weights, data=Position(-1))
    manager = make_manager(checkpoint, tmp_path / "old")
    path = manager.save(1)
    manager.sync()
    weights["w"] = jnp.zeros(3)
    with pytest.raises(RuntimeError, match="no such position"):
        checkpoint.read(path, may_differ="data")
    assert not weights["w"].any()


def restore(only=None, num_classes=2, width=8, has_extra=False, **selection):
    def call(saved):
        model = Net(1, num_classes, width)
        if has_extra:
            model.extra = nnx.Param(jnp.ones(1))
        before = read(model)
        try:
            Checkpoint(model=model).read(saved[1], only=only, **selection)
        finally:
            assert_same(read(model), before)

    return call


IS_THERE = r"There is:\n  model/backbone\n  model/head\n"


@mistakes(
    {
        CheckpointMismatchError: {
            r"(?s)2 leaves differ .*:\n  ~ model/head/bias: float32 \(10,\) in the "
            r"checkpoint, float32 \(2,\) in the program\n  ~ model/head/kernel.*"
            r"`may_differ='model/head'`. Nothing was restored": restore(),
            # Nothing fits, so that nothing can be left out either.
            "(?s)~ model/backbone/bias: .*name what to restore": restore(
                num_classes=2, width=4
            ),
            "(?s)nothing of it would be restored.*`only`.*~ model/head/bias": restore(
                "model/head", may_differ="model/head"
            ),
            "nothing of it would be restored. Name what": restore(skip="model"),
            "nothing of it would be restored. Name what fits": restore([]),
            "(?s)`only` names 'model/bakbone', which is not in the program. "
            + IS_THERE: restore("model/bakbone"),
            "(?s)`only` names 'model/extra', which is not in the checkpoint. There is:"
            "\n  data\n  model/backbone": restore("model/extra", has_extra=True),
            "(?s)`skip` names 'model/haed', .*  model/head\n": restore(
                skip="model/haed"
            ),
        },
        ValueError: {
            "`only` is 3, but it must be a path, or a list of paths": restore(3),
            r"`skip` is \['model', 3\], but": restore(skip=["model", 3]),
            "`may_differ` is '/', .* none of them empty": restore(may_differ="/"),
        },
    }
)
def test_what_does_not_fit_is_an_error_and_changes_nothing(call, error, message, saved):
    with pytest.raises(error, match=message):
        call(saved)


def test_a_damaged_or_missing_checkpoint_is_an_error(saved, tmp_path):
    _, path = saved
    checkpoint = Checkpoint(model=Net(1, 10))
    with pytest.raises(CheckpointError, match=r"nowhere', which is no complete"):
        checkpoint.read(tmp_path / "nowhere")
    (tmp_path / "pretraining" / "checkpoint_5" / "manifest" / "manifest.json").unlink()
    with pytest.raises(CheckpointDamageError, match=r"manifest\.json"):
        checkpoint.read(path)
