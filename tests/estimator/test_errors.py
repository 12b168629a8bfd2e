"""Tests that estimators refuse what cannot work, by name."""

import json
import re

import jax.numpy as jnp
import optax
import pytest
from flax import nnx

import armillary
from armillary import estimator
from armillary.errors import CapturedStateError, EstimatorError
from armillary.estimator import EstimatorSpec, ModeKeys
from tests.estimator.problems import (
    X,
    Y,
    features_of,
    linear_model_fn,
    make_config,
    make_input_fn,
    make_regressor,
)


def make_layer(rngs: nnx.Rngs) -> nnx.Linear:
    return nnx.Linear(1, 1, rngs=rngs)


def make_model_fn(**changes):
    """Returns a model function with some entries of its spec changed."""

    def model_fn(features, labels, mode, modules):
        layer = modules.make("layer", make_layer)
        predictions = layer(features["a"][:, None])[:, 0]
        errors = (predictions - labels) ** 2
        entries = {"loss": errors.mean(), "train_op": optax.sgd(0.1)}
        for name, value in changes.items():
            entries[name] = value(errors) if callable(value) else value
        return EstimatorSpec(mode, predictions, **entries)

    return model_fn


def train(tmp_path, model_fn, input_fn=None):
    made = estimator.Estimator(model_fn, tmp_path, make_config())
    return made.train(input_fn or make_input_fn(), steps=1)


def no_spec(features, labels, mode, modules):
    return {"loss": 0.0}


def no_modules(features, labels, mode, modules):
    return EstimatorSpec(mode, loss=jnp.mean(labels), train_op=optax.sgd(0.1))


@pytest.mark.parametrize(
    ("model_fn", "message"),
    [
        (no_spec, r"`model_fn` returned {'loss': 0.0} of type dict"),
        (no_modules, r"`model_fn` made no module that has an `nnx.Param`"),
        (make_model_fn(loss=None), r"`loss` of the `EstimatorSpec` is None"),
        (make_model_fn(train_op=None), r"`train_op` of the `EstimatorSpec` is None"),
        (make_model_fn(loss=lambda e: e), r"`loss` .* has the shape \(4,\)"),
    ],
)
def test_model_functions(tmp_path, model_fn, message):
    with pytest.raises(EstimatorError, match=message):
        train(tmp_path, model_fn)


def test_modules_are_made_in_every_mode_and_for_every_batch(tmp_path):
    def model_fn(features, labels, mode, modules):
        if mode == ModeKeys.EVAL or len(labels) == 2:
            modules.make("other", make_layer)
        return make_model_fn()(features, labels, mode, modules)

    made = estimator.Estimator(model_fn, tmp_path, make_config())
    made.train(make_input_fn(X[:8], Y[:8]))
    message = r"`modules.make\('other', ...\)` was not"
    with pytest.raises(EstimatorError, match=message):
        made.evaluate(make_input_fn())
    with pytest.raises(EstimatorError, match=message):
        made.train(make_input_fn(X[:6], Y[:6]))


@pytest.mark.parametrize("replicas", [1, 2])
def test_losses_are_not_scaled_twice(tmp_path, replicas):
    model_fn = make_model_fn(loss=armillary.compute_average_loss)
    made = estimator.Estimator(model_fn, tmp_path, make_config(replicas))
    with pytest.raises(EstimatorError, match="`model_fn` uses the number of replicas"):
        made.train(make_input_fn(), steps=1)


def test_modules_from_elsewhere_are_refused(tmp_path):
    elsewhere = make_layer(nnx.Rngs(0))

    def model_fn(features, labels, mode, modules):
        modules.make("layer", make_layer)
        loss = (elsewhere(features["a"][:, None])[:, 0] - labels).mean()
        return EstimatorSpec(mode, loss=loss, train_op=optax.sgd(0.1))

    with pytest.raises(CapturedStateError, match="2 variables") as raised:
        train(tmp_path, model_fn)
    assert "make its modules with `modules.make" in raised.value.__notes__[0]


@pytest.mark.parametrize(
    ("made", "error", "message"),
    [
        (None, EstimatorError, r"`input_fn` returned None of type NoneType"),
        ((features_of(X), Y), EstimatorError, r"returned \({'a': .* of type tuple"),
        ([features_of(X)], EstimatorError, r"batches of `input_fn` are of type dict"),
        ([], ValueError, r"no batch"),
    ],
)
def test_input_functions(tmp_path, made, error, message):
    with pytest.raises(error, match=re.compile(message, re.DOTALL)):
        make_regressor(tmp_path).train(lambda: made, steps=1)


def set_cluster(monkeypatch, task_type, index=0, **jobs):
    cluster = {"worker": ["127.0.0.1:2221", "127.0.0.1:2222"], **jobs}
    task = {"type": task_type, "index": index}
    config = {"cluster": cluster, "task": task}
    monkeypatch.setenv("TF_CONFIG", json.dumps(config))


def test_workers_do_not_train_alone(tmp_path, monkeypatch):
    config = estimator.RunConfig()
    assert (config.task_type, config.task_id, config.is_chief) == ("worker", 0, True)
    assert (config.num_worker_replicas, config.cluster_spec.jobs) == (1, [])
    set_cluster(monkeypatch, "worker", 1)
    config = estimator.RunConfig()
    assert (config.task_type, config.task_id, config.is_chief) == ("worker", 1, False)
    assert (config.num_worker_replicas, config.cluster_spec.jobs) == (2, ["worker"])
    for strategy in (None, armillary.MirroredStrategy()):
        config = estimator.RunConfig(train_distribute=strategy)
        with pytest.raises(EstimatorError, match="2 processes that train, and each"):
            estimator.Estimator(linear_model_fn, tmp_path, config)


@pytest.mark.slow
def test_an_evaluator_evaluates_and_does_not_train(tmp_path, monkeypatch):
    expected = make_regressor(tmp_path).train(make_input_fn(), max_steps=3)
    expected = expected.evaluate(make_input_fn())
    set_cluster(monkeypatch, "evaluator", ps=["127.0.0.1:2223"])
    made = estimator.Estimator(linear_model_fn, tmp_path)
    with pytest.raises(EstimatorError, match="in the task evaluator 0, which does not"):
        made.train(make_input_fn(), steps=1)
    result, _ = estimator.train_and_evaluate(
        made,
        estimator.TrainSpec(make_input_fn(), max_steps=3),
        estimator.EvalSpec(make_input_fn()),
    )
    assert result == pytest.approx(expected, rel=1e-6)
