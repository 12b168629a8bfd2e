"""Tests of compiled Keras models in a `Checkpoint`."""

import numpy as np
import pytest

import armillary
from armillary.errors import CheckpointMismatchError
from tests.tiers import slow_after_first


@pytest.fixture
def fit(problem):
    """Returns a function that makes a model, and fits it unless it shall be new."""

    def make(*, is_new=False, **options):
        model = problem.make_model(**options)
        model.optimizer.build(model.trainable_variables)
        if not is_new:
            model.fit(problem.x, problem.y, verbose=0)
        return model

    return make


def save(folder, **objects):
    manager = armillary.CheckpointManager(armillary.Checkpoint(**objects), folder)
    manager.save(1)
    manager.sync()
    return manager.latest_checkpoint


def restore(how, folder, path, **objects):
    checkpoint = armillary.Checkpoint(**objects)
    if how == "read":
        checkpoint.read(path)
    else:
        armillary.CheckpointManager(checkpoint, folder).restore_or_initialize()


@pytest.mark.slow
@slow_after_first("how", ["read", "restore_or_initialize"])
def test_a_model_may_be_restored_before_and_after_it_is_fitted(
    fit, problem, tmp_path, how
):
    model, fitted, new = fit(), fit(), fit(is_new=True)
    path = save(tmp_path, model=model, optimizer=model.optimizer)
    for other in (fitted, new):
        fitted.predict(problem.x, verbose=0)
        restore(how, tmp_path, path, model=other, optimizer=other.optimizer)
        for a, b in zip(problem.read(other), problem.read(model), strict=True):
            np.testing.assert_array_equal(a, b)
        own, saved = other.optimizer.variables, model.optimizer.variables
        for a, b in zip(own, saved, strict=True):
            np.testing.assert_array_equal(a.value, b.value)
    states = [np.array(v.value) for v in fitted.metrics_variables]
    assert len(states) == 4  # the loss and the accuracy, each a total and a count
    for a, b in zip(states, model.metrics_variables, strict=True):
        np.testing.assert_array_equal(a, b.value)


@pytest.mark.slow
def test_a_new_model_in_a_trainer_takes_a_checkpoint_of_other_metrics(
    fit, problem, tmp_path
):
    class Trainer:
        def __init__(self, model):
            self.model = model

    new = fit(is_new=True, metrics=["mse", "accuracy"])
    path = save(tmp_path, trainer=Trainer(new))
    fitted = fit()
    restore("read", tmp_path, path, trainer=Trainer(fitted))
    for a, b in zip(problem.read(fitted), problem.read(new), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.slow
def test_all_else_of_a_compiled_model_must_fit(fit, problem, keras, tmp_path):
    path = save(tmp_path, model=fit())
    for other in (
        problem.make_uncompiled("sequential"),  # which has no metrics to leave
        fit(is_new=True, optimizer=keras.optimizers.SGD(momentum=0.9)),
    ):
        with pytest.raises(CheckpointMismatchError, match="model/optimizer"):
            restore("read", tmp_path, path, model=other)
