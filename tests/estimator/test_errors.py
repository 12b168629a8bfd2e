"""What cannot work is refused by name."""

import json
import re

import jax.numpy as jnp
import optax
import pytest
from flax import nnx

import armillary
from armillary import estimator
from armillary.errors import CapturedStateError, EstimatorError
from armillary.estimator import EstimatorSpec, ModeKeys, _estimator
from tests.estimator.problems import (
    X,
    Y,
    features_of,
    linear_model_fn,
    make_config,
    make_input_fn,
    make_regressor,
)
from tests.mistakes import mistakes


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


def other_name(features, labels, mode, modules):
    modules.make("a layer", make_layer)


def other_module(features, labels, mode, modules):
    modules.make("layer", lambda rngs: 3)


@pytest.mark.parametrize(
    ("model_fn", "message"),
    [
        (no_spec, r"`model_fn` returned {'loss': 0.0} of type dict"),
        (no_modules, r"`model_fn` made no module that has an `nnx.Param`"),
        (other_name, r"given the name 'a layer', but it must be a Python identifier"),
        (other_module, r"`make_fn` of the module 'layer' returned 3 of type int"),
        (make_model_fn(loss=None), r"`loss` of the `EstimatorSpec` is None"),
        (make_model_fn(train_op=None), r"`train_op` of the `EstimatorSpec` is None"),
        (make_model_fn(train_op="SGD"), r"`train_op` .* is 'SGD', but"),
        (make_model_fn(loss=lambda e: e), r"`loss` .* has the shape \(4,\)"),
    ],
)
def test_model_functions(tmp_path, model_fn, message):
    with pytest.raises(EstimatorError, match=message):
        train(tmp_path, model_fn)


@pytest.mark.parametrize(
    ("ops", "message"),
    [
        ({"loss": 0.0}, r'has the entry "loss"'),
        ({"a": 1.0}, r"`eval_metric_ops\['a'\]` is a scalar"),
    ],
)
def test_metrics(tmp_path, ops, message):
    made = estimator.Estimator(make_model_fn(eval_metric_ops=ops), tmp_path)
    with pytest.raises(EstimatorError, match=message):
        made.evaluate(make_input_fn())


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
    assert "it makes its modules by `modules.make" in raised.value.__notes__[0]


def test_predictions_that_cannot_be_made(tmp_path, monkeypatch):
    def model_fn(features, mode, modules):
        return EstimatorSpec(mode, predictions={"mean": features["a"].mean()})

    made = estimator.Estimator(model_fn, tmp_path)
    with pytest.raises(ValueError, match=r"`mean` of what `model_fn` returned .*\(\)"):
        next(made.predict(make_input_fn()))
    with pytest.raises(ValueError, match="repeats its data for ever"):
        next(made.predict(make_input_fn(repeat=True)))
    monkeypatch.setattr(_estimator, "get_peers", lambda: "peers")
    with pytest.raises(EstimatorError, match="`predict` was called where several"):
        made.predict(make_input_fn())


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


# What `tests/meta/test_arguments.py` cannot tell from the names of arguments.
@mistakes(
    {
        TypeError: {
            "`warm_start_from` .* `make_fn`": lambda: estimator.Estimator(
                linear_model_fn, warm_start_from="run"
            ),
            "`device_fn` .* Leave it out": lambda: estimator.RunConfig().replace(
                device_fn=None
            ),
            "`training_hooks` .* Leave it out": lambda: EstimatorSpec(
                ModeKeys.TRAIN, training_hooks=[]
            ),
            "`throttle_secs` .* each checkpoint is evaluated": lambda: (
                estimator.EvalSpec(min, throttle_secs=1)
            ),
        },
        ValueError: {
            "`max_steps` is 0": lambda: estimator.TrainSpec(min, 0),
            "`log_step_count_steps` is 0": lambda: estimator.RunConfig(
                log_step_count_steps=0
            ),
        },
    }
)
def test_arguments(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_arguments_of_methods(tmp_path):
    made = make_regressor(tmp_path)
    with pytest.raises(ValueError, match="`steps` is 1 and `max_steps` is 2, but only"):
        made.train(make_input_fn(), steps=1, max_steps=2)
    with pytest.raises(ValueError, match="`steps` is 0"):
        made.evaluate(make_input_fn(), steps=0)
    for method in ("train", "evaluate", "predict"):
        message = rf"`hooks` is None, but `Estimator.{method}` has .* Leave it out"
        with pytest.raises(TypeError, match=message):
            getattr(made, method)(make_input_fn(), hooks=None)


def test_two_directories(tmp_path):
    config = estimator.RunConfig(model_dir=tmp_path / "other")
    with pytest.raises(EstimatorError, match=r"`model_dir` is .* that of `config`"):
        estimator.Estimator(linear_model_fn, tmp_path, config)
    made = estimator.Estimator(linear_model_fn, config=config)
    assert made.model_dir == str(tmp_path / "other")


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
