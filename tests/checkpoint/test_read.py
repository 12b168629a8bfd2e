"""Tests of `Checkpoint.read`, which restores parts into a different program."""

import logging

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from armillary.checkpoint import Checkpoint, _reader
from armillary.errors import CheckpointMismatchError
from tests.mistakes import mistakes
from tests.problems import Holder


class Position:
    def __init__(self, index=0):
        self.index = index

    def get_state(self):
        return {"index": self.index}

    def set_state(self, state):
        self.index = state["index"]


class Net(nnx.Module):
    def __init__(self, seed, num_classes, width=8):
        rngs = nnx.Rngs(seed)
        self.backbone = nnx.Linear(16, width, rngs=rngs)
        self.head = nnx.Linear(width, num_classes, rngs=rngs)


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
        lambda folder, shardings, specs: (
            asked.extend(shardings) or read_arrays(folder, shardings, specs)
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


def test_a_dictionary_gives_an_object_the_path_of_the_checkpoint(saved):
    pretrained, path = saved
    encoder, position = Net(1, num_classes=2).backbone, Position()
    checkpoint = Checkpoint(model={"backbone": encoder}, data=position)
    report = checkpoint.read(path, only=["model/backbone", "data"])
    assert position.index == 7
    assert_same(read(encoder), read(pretrained)["backbone"])
    assert report.restored == ("data", "model/backbone/bias", "model/backbone/kernel")
    assert (report.kept, len(report.unused)) == ((), 7)


@pytest.mark.parametrize("nest", [lambda p: p, lambda p: {"a": [p]}, lambda p: (p, 1)])
def test_a_dictionary_inside_other_containers_is_restored_in_place(nest, tmp_path):
    saved = {"state": nest({"w": jnp.ones(3), "deep": {"b": jnp.ones(2)}})}
    path = Checkpoint(trainer=saved).write(tmp_path / "saved")
    own = {"w": jnp.zeros(3), "deep": {"b": jnp.zeros(2)}}
    deep = own["deep"]
    given = {"state": nest(own)}
    Checkpoint(trainer=given).read(path)
    assert_same([own["w"], deep["b"]], [np.ones(3), np.ones(2)])
    assert_same(given, saved)


def test_a_tuple_is_replaced_in_the_dictionary_that_holds_it(tmp_path):
    path = Checkpoint(trainer={"state": (jnp.ones(3),)}).write(tmp_path / "saved")
    old = (jnp.zeros(3),)
    given = {"state": old}
    Checkpoint(trainer=given).read(path)
    assert_same(given["state"], (np.ones(3),))
    assert_same(old, (np.zeros(3),))


def test_a_dictionary_with_two_places_gets_two_values(tmp_path):
    saved = {"params": {"w": jnp.ones(3)}, "target": {"w": jnp.zeros(3)}}
    path = Checkpoint(state={"value": saved}).write(tmp_path / "saved")
    shared = {"w": jnp.full(3, 2.0)}
    given = {"value": {"params": shared, "target": shared}}
    Checkpoint(state=given).read(path)
    assert_same(given["value"], saved)


def test_a_restore_that_fails_puts_containers_back(tmp_path):
    class Refusing(Position):
        def set_state(self, state):
            if state["index"] != self.index:
                raise RuntimeError("no")

    saved = Checkpoint(trainer={"state": {"w": jnp.ones(3)}}, data=Refusing(1))
    path = saved.write(tmp_path / "saved")
    own = {"w": jnp.zeros(3)}
    with pytest.raises(RuntimeError, match="no"):
        Checkpoint(trainer={"state": own}, data=Refusing(2)).read(path)
    assert_same(own["w"], np.zeros(3))


def test_an_average_of_an_earlier_release_is_read_into_a_plain_model(
    make_manager, tmp_path
):
    averaged, plain = Net(0, num_classes=2), Net(1, num_classes=2)
    count = nnx.Variable(jnp.full((), 3))
    ema = Holder(model=averaged, num_updates=count, decay=0.99)
    manager = make_manager(Checkpoint(model=Net(2, 2), ema=ema), tmp_path / "run")
    path = manager.save(1)
    manager.sync()
    report = Checkpoint(ema={"model": plain}).read(path, only="ema/model")
    assert_same(read(plain), read(averaged))
    assert len(report.restored) == 4 and not report.kept


def test_a_run_begins_with_a_part_and_continues_with_its_own(saved, make_manager):
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


def restore(
    only=None, num_classes=2, width=8, has_extra=False, name="model", **selection
):
    def call(saved):
        model = Net(1, num_classes, width)
        if has_extra:
            model.extra = nnx.Param(jnp.ones(1))
        before = read(model)
        try:
            checkpoint = Checkpoint(**{name: model})
            checkpoint.read(saved[1], only=only, **selection)
        finally:
            assert_same(read(model), before)

    return call


@mistakes(
    {
        CheckpointMismatchError: {
            "(?s)2 leaves .*`may_differ='model/head'`.*new directory. N": restore(),
            # Nothing fits, so that nothing can be left out either.
            "(?s)~ model/backbone/bias: .*no leaf is the same in both": restore(
                num_classes=2, width=4
            ),
            "(?s)nothing of it would be restored.*`only`.*~ model/head/bias": restore(
                "model/head", may_differ="model/head"
            ),
            "nothing of it would be restored. To .*, add a": restore(skip="model"),
            r"(?s)'model/bakbone' is neither in it nor in the program. Existing .*:\n"
            r"  data\n  model/backbone\n  model/head\n": restore("model/bakbone"),
            r"\+ model/extra: float32 \(1,\)": restore("model/extra", has_extra=True),
            "(?s)'model/haed' is neither": restore(skip="model/haed"),
            r"use the saved name: `Checkpoint\(model=...\)`, not `models`": restore(
                name="models"
            ),
        },
    }
)
def test_a_part_that_does_not_fit_is_an_error_and_changes_nothing(
    call, error, message, saved
):
    with pytest.raises(error, match=message):
        call(saved)
