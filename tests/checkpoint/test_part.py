"""A part of a checkpoint goes into another program; the rest of both is left alone."""

import logging

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from armillary.checkpoint import Checkpoint, RestoredPart
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
    def __init__(self, seed, num_classes, width=3):
        rngs = nnx.Rngs(seed)
        self.backbone = nnx.Linear(2, width, rngs=rngs)
        self.head = nnx.Linear(width, num_classes, rngs=rngs)


def read(model):
    return jax.tree.map(np.array, nnx.to_pure_dict(nnx.state(model)))


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


def test_a_backbone_goes_into_a_model_with_another_head(saved, make_manager, caplog):
    pretrained, path = saved
    model = Net(1, num_classes=2)
    head = read(model)["head"]
    manager = make_manager(Checkpoint(model=model))
    with caplog.at_level(logging.INFO, logger="armillary"):
        report = manager.restore_part(path, "model/backbone")
    now = read(model)
    jax.tree.map(
        np.testing.assert_array_equal, now["backbone"], read(pretrained)["backbone"]
    )
    jax.tree.map(np.testing.assert_array_equal, now["head"], head)
    assert report.restored == ("model/backbone/bias", "model/backbone/kernel")
    assert report.kept == ("model/head/bias", "model/head/kernel")
    assert report.unused[:3] == ("data", "model/head/bias", "model/head/kernel")
    assert all(name.startswith("optimizer/") for name in report.unused[3:])
    text = str(report)
    assert text in caplog.text
    assert text.startswith(
        f"A part of {path}:\n"
        "2 restored:\n  model/backbone/bias\n  model/backbone/kernel\n"
        "2 of the program, left as they were:\n"
        "  model/head/bias\n  model/head/kernel\n"
    )
    assert f"{len(report.unused)} of the checkpoint, not used:\n  data\n" in text


def test_a_part_that_has_another_path_in_the_program(saved, make_manager):
    pretrained, path = saved
    encoder, position = Net(1, 2).backbone, Position()
    checkpoint = Checkpoint(run=encoder, reader=position)
    manager = make_manager(checkpoint)
    report = manager.restore_part(path, {"model/backbone": "run", "data": "reader"})
    assert position.index == 7
    np.testing.assert_array_equal(encoder.kernel[...], pretrained.backbone.kernel[...])
    assert report.restored == ("reader", "run/bias", "run/kernel")
    assert (report.kept, report.path) == ((), path)
    assert "0 of the program, left as they were.\n" in str(report)


def test_several_parts(saved, make_manager):
    _, path = saved
    model, position = Net(1, num_classes=10), Position(3)
    manager = make_manager(Checkpoint(model=model, data=position))
    report = manager.restore_part(path, ["model/backbone/kernel", "model/head/"])
    assert report.restored == (
        "model/backbone/kernel",
        "model/head/bias",
        "model/head/kernel",
    )
    assert report.kept == ("data", "model/backbone/bias")
    # Its state was not set again either.
    assert position.index == 3


def test_a_run_begins_with_a_part_and_goes_on_with_its_own(saved, make_manager):
    pretrained, path = saved
    model = Net(1, num_classes=2)
    step = {"value": jnp.zeros((), jnp.int32)}

    def make():
        manager = make_manager(
            Checkpoint(model=model, step=step),
            step_counter=lambda: step["value"],
            init_fn=lambda: manager.restore_part(path, "model/backbone"),
        )
        return manager

    manager = make()
    assert manager.restore_or_initialize() is None
    np.testing.assert_array_equal(
        model.backbone.kernel[...], pretrained.backbone.kernel[...]
    )
    assert not manager.has_saved_step()
    model.backbone.kernel[...] = jnp.ones((2, 3))
    own = manager.save()
    manager.sync()
    assert make().restore_or_initialize() == own
    np.testing.assert_array_equal(model.backbone.kernel[...], np.ones((2, 3)))


def test_arrays_go_to_the_devices_of_the_program(saved, make_manager):
    pretrained, path = saved
    model = Net(1, num_classes=2)
    mesh = jax.make_mesh((2,), ("x",), devices=jax.devices()[:2])
    sharding = jax.sharding.NamedSharding(mesh, jax.P())
    model.backbone.kernel.set_value(
        jax.device_put(model.backbone.kernel.get_value(), sharding)
    )
    make_manager(Checkpoint(model=model)).restore_part(path, "model/backbone")
    kernel = model.backbone.kernel.get_value()
    assert kernel.sharding == sharding
    np.testing.assert_array_equal(kernel, pretrained.backbone.kernel[...])


def test_a_state_that_refuses_undoes_all(make_manager, tmp_path):
    weights = {"w": jnp.ones(3)}
    manager = make_manager(
        Checkpoint(weights=weights, data=Position(-1)), tmp_path / "old"
    )
    path = manager.save(1)
    manager.sync()
    weights["w"] = jnp.zeros(3)
    with pytest.raises(RuntimeError, match="no such position"):
        manager.restore_part(path, ["weights", "data"])
    assert not weights["w"].any()


def restore(parts, **options):
    def call(saved, make_manager):
        model = Net(1, num_classes=2, **options)
        before = read(model)
        manager = make_manager(Checkpoint(model=model))
        try:
            manager.restore_part(saved[1], parts)
        finally:
            jax.tree.map(np.testing.assert_array_equal, read(model), before)

    return call


@mistakes(
    {
        CheckpointMismatchError: {
            r"(?s)2 leaves of its part 'model' differ.*"
            r"~ model/head/bias: float32 \(10,\) in the checkpoint, float32 \(2,\) in "
            r"the program\n  ~ model/head/kernel.*Nothing was restored": restore(
                "model"
            ),
            r"(?s)2 leaves of its part 'model/backbone' differ.*~ model/backbone/bias: "
            r"float32 \(3,\) in the checkpoint, float32 \(4,\) in the program": restore(
                "model/backbone", width=4
            ),
            r"(?s)3 leaves of its part 'model/backbone/bias' \(here "
            r"'model/head'\).*- model/head: .* only in the checkpoint.*\+ model/head/"
            "bias: .* only in the program": restore(
                {"model/backbone/bias": "model/head"}
            ),
            r"(?s)names 'model/bakbone', which the checkpoint does not have. It has:\n"
            r"  model/backbone\n  model/head\nUse one": restore("model/bakbone"),
            r"(?s)names 'encoder', which the checkpoint does not have. It has:\n"
            r"  data\n  model\n  optimizer\n": restore({"encoder": "model"}),
            r"names 'model/backbone/kernel/x', which the checkpoint": restore(
                "model/backbone/kernel/x"
            ),
            r"(?s)names 'data', which the program does not have. It has:\n  model\n": (
                restore("data")
            ),
            r"names 'model/back', which the checkpoint does": restore("model/back"),
        },
        TypeError: {
            "`parts` is 3 of type int.*a path, several": restore(3),
            r"`parts` is \['model', 3\] of type list": restore(["model", 3]),
            "`parts` is {'model': None} of type dict": restore({"model": None}),
        },
        ValueError: {
            r"`parts` is \[\], but it must name": restore([]),
            "`parts` is {}, but it must name": restore({}),
            r"`parts` is \['/'\], but it must name": restore("/"),
            "'model/head' is a part of 'model', but parts must": restore(
                ["model/head", "model"]
            ),
            "'model' is a part of 'model', but": restore(
                {"model/head": "model", "model/backbone": "model"}
            ),
        },
    }
)
def test_what_does_not_fit_is_an_error_and_changes_nothing(
    call, error, message, saved, make_manager
):
    with pytest.raises(error, match=message):
        call(saved, make_manager)


def test_a_damaged_or_missing_checkpoint_is_an_error(saved, make_manager, tmp_path):
    _, path = saved
    manager = make_manager(Checkpoint(model=Net(1, 2)))
    with pytest.raises(CheckpointError, match="nowhere', which does not exist"):
        manager.restore_part(tmp_path / "nowhere", "model")
    with pytest.raises(CheckpointError, match=r"not a complete.*checkpoint_5'"):
        manager.restore_part(tmp_path / "pretraining", "model")
    (tmp_path / "pretraining" / "checkpoint_5" / "manifest" / "manifest.json").unlink()
    with pytest.raises(CheckpointDamageError, match=r"manifest\.json"):
        manager.restore_part(path, "model/backbone")


def test_the_report_of_a_large_part_is_short():
    paths = tuple(f"model/{number:03}" for number in range(100))
    text = str(RestoredPart("runs/checkpoint_1", paths, (), ()))
    assert text.splitlines()[1] == "100 restored:"
    assert "  ... and 80 more" in text
