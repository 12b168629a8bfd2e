"""What cannot work is refused by name."""

import json
import re

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import armillary
from armillary import estimator
from armillary.errors import CapturedStateError, EstimatorError, NonFiniteError
from armillary.estimator import EstimatorSpec, ModeKeys, _estimator, numeric_column
from tests.estimator.problems import (
    COLUMNS,
    X,
    Y,
    features_of,
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
        return EstimatorSpec(entries.pop("mode", mode), predictions, **entries)

    return model_fn


def train(tmp_path, model_fn, input_fn=None):
    made = estimator.Estimator(model_fn, tmp_path, make_config())
    return made.train(input_fn or make_input_fn(), steps=1)


def no_spec(features, labels, mode, modules):
    return {"loss": 0.0}


def no_modules(features, labels, mode, modules):
    return EstimatorSpec(mode, loss=jnp.mean(labels), train_op=optax.sgd(0.1))


def no_labels(features, mode, modules):
    return EstimatorSpec(mode)


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
        (make_model_fn(mode="infer"), r"`mode` of the `EstimatorSpec` is 'infer'"),
        (make_model_fn(loss=None), r"`loss` of the `EstimatorSpec` is None"),
        (make_model_fn(train_op=None), r"`train_op` of the `EstimatorSpec` is None"),
        (make_model_fn(train_op="SGD"), r"`train_op` .* is 'SGD' of type str"),
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
        ({"a": (1.0, {})}, r"`eval_metric_ops\['a'\]` is \(1.0, {}\), but a pair"),
    ],
)
def test_metrics(tmp_path, ops, message):
    made = estimator.Estimator(make_model_fn(eval_metric_ops=ops), tmp_path)
    with pytest.raises(EstimatorError, match=message):
        made.evaluate(make_input_fn())


def test_modules_are_made_in_every_mode(tmp_path):
    def model_fn(features, labels, mode, modules):
        if mode == ModeKeys.EVAL:
            modules.make("other", make_layer)
        return make_model_fn()(features, labels, mode, modules)

    made = estimator.Estimator(model_fn, tmp_path)
    with pytest.raises(EstimatorError, match=r"`modules.make\('other', ...\)` was not"):
        made.evaluate(make_input_fn())


def test_modules_do_not_depend_on_the_batch(tmp_path):
    def model_fn(features, labels, mode, modules):
        name = "layer" if len(labels) == 4 else "other"
        modules.make(name, make_layer)
        return make_model_fn()(features, labels, mode, modules)

    with pytest.raises(EstimatorError, match="in a step that is traced"):
        train(tmp_path, model_fn, make_input_fn(X[:6], Y[:6], batch_size=4)).train(
            make_input_fn(X[:6], Y[:6], batch_size=2)
        )


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


def test_several_processes_do_not_predict(tmp_path, monkeypatch):
    monkeypatch.setattr(_estimator, "get_peers", lambda: "peers")
    with pytest.raises(EstimatorError, match="`predict` was called where several"):
        make_regressor(tmp_path).predict(make_input_fn())


@pytest.mark.parametrize("method", ["train", "evaluate", "predict"])
def test_keywords_of_tensorflow_are_answered_when_a_method_is_called(tmp_path, method):
    call = getattr(make_regressor(tmp_path), method)
    message = rf"`hooks` is None, but `Estimator.{method}` has .* Leave it out: there"
    with pytest.raises(TypeError, match=message):
        call(make_input_fn(), hooks=None)


def test_predictions_have_an_entry_for_each_example(tmp_path):
    def model_fn(features, mode, modules):
        modules.make("layer", make_layer)
        return EstimatorSpec(mode, predictions={"mean": features["a"].mean()})

    made = estimator.Estimator(model_fn, tmp_path)
    with pytest.raises(
        EstimatorError, match=r"have the shapes \[\(\)\], but the batch"
    ):
        next(made.predict(make_input_fn()))


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (None, r"`input_fn` returned None of type NoneType"),
        ((features_of(X), Y), r"`input_fn` returned \({'a': .* of type tuple"),
        ([features_of(X)], r"batches of `input_fn` are of type dict"),
        ([], r"`input_fn` returned a data set that cannot be used: .* no batches"),
    ],
)
def test_input_functions(tmp_path, made, message):
    with pytest.raises(EstimatorError, match=re.compile(message, re.DOTALL)):
        make_regressor(tmp_path).train(lambda: made, steps=1)


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (({"a": X[:, 0]}, Y), r"The features have no 'b', .* they have \['a'\]"),
        ((X, Y), r"The features are of type .*, but columns find theirs in a dict"),
        (
            ({"a": X, "b": X[:, 1:]}, Y),
            r"The feature 'a' has the shape \(3,\) for each example",
        ),
        ((features_of(X), X), r"The labels have the shape \(72, 3\)"),
        ((features_of(X), None), r"The labels are None"),
    ],
)
def test_features_and_labels(tmp_path, batch, message):
    with pytest.raises(EstimatorError, match=message):
        make_regressor(tmp_path).train(lambda: [batch], steps=1)


@pytest.mark.slow
def test_labels_of_classes(tmp_path):
    classifier = estimator.LinearClassifier(COLUMNS, tmp_path, n_classes=3)
    with pytest.raises(EstimatorError, match="The labels have the dtype float32"):
        classifier.train(make_input_fn(), steps=1)
    binary = estimator.LinearClassifier(COLUMNS, tmp_path)
    with pytest.raises(ValueError, match="label"):
        binary.evaluate(make_input_fn(X, np.full(len(X), 0.5, "float32")))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("count", "label", "rule"),
    [
        (2, -1, "A label that is not 0 or 1 is such a value: `n_classes` is 2."),
        (5, 9, "not one of 0 to 4 is such a value: `n_classes` is 5."),
    ],
)
def test_a_label_of_no_class_ends_training(tmp_path, count, label, rule):
    labels = np.zeros(len(X), "int32")
    labels[-1] = label
    classifier = estimator.LinearClassifier(COLUMNS, tmp_path, n_classes=count)
    with pytest.raises(NonFiniteError) as caught:
        classifier.train(make_input_fn(X, labels))
    assert rule in caught.value.__notes__[-1]


def make_canned(kind="LinearRegressor", **arguments):
    network = {"hidden_units": [4]} if kind.startswith("DNN") else {}
    defaults = {"feature_columns": COLUMNS, **network}
    return lambda: getattr(estimator, kind)(**{**defaults, **arguments})


# What `tests/meta/test_arguments.py` cannot tell from the names of arguments.
@mistakes(
    {
        EstimatorError: {
            "'Lion', but it": make_canned(optimizer="Lion"),
            "`n_classes` is 1": make_canned("LinearClassifier", n_classes=1),
            "`hidden_units` is 8": make_canned("DNNClassifier", hidden_units=8),
            "`dropout` is 1.5": make_canned("DNNRegressor", dropout=1.5),
            r"`feature_columns` is \['a'\], but": make_canned(feature_columns=["a"]),
            r"`feature_columns` is \[\]": make_canned(feature_columns=[]),
        },
        TypeError: {
            "`weight_column` .* no such argument": make_canned(weight_column="w"),
            "`activation_fn` .* callable": make_canned(
                "DNNRegressor", activation_fn="x"
            ),
            "`warm_start_from` .* `make_fn`": lambda: estimator.Estimator(
                no_labels, warm_start_from="run"
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
            "Use `save_checkpoints_steps`": lambda: estimator.RunConfig(
                save_checkpoints_secs=60
            ),
        },
        ValueError: {
            "`key` is 3": lambda: numeric_column(3),
            r"`shape` is \(0,\)": lambda: numeric_column("a", (0,)),
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


def test_steps(tmp_path):
    made = make_regressor(tmp_path)
    with pytest.raises(ValueError, match="`steps` is 1 and `max_steps` is 2, but only"):
        made.train(make_input_fn(), steps=1, max_steps=2)
    with pytest.raises(ValueError, match="`steps` is 0"):
        made.evaluate(make_input_fn(), steps=0)


def test_two_directories(tmp_path):
    config = estimator.RunConfig(model_dir=tmp_path / "other")
    with pytest.raises(EstimatorError, match=r"`model_dir` is .* that of `config`"):
        estimator.LinearRegressor(COLUMNS, tmp_path, config=config)
    made = estimator.LinearRegressor(COLUMNS, config=config)
    assert made.model_dir == str(tmp_path / "other")


def set_cluster(monkeypatch, task_type, index=0, **jobs):
    cluster = {"worker": ["127.0.0.1:2221", "127.0.0.1:2222"], **jobs}
    task = {"type": task_type, "index": index}
    config = {"cluster": cluster, "task": task}
    monkeypatch.setenv("TF_CONFIG", json.dumps(config))


def test_workers_do_not_train_alone(tmp_path, monkeypatch):
    set_cluster(monkeypatch, "worker", 1)
    config = estimator.RunConfig()
    assert config.task_type == "worker"
    assert config.task_id == 1
    assert config.num_worker_replicas == 2
    assert not config.is_chief
    assert config.cluster_spec.jobs == ["worker"]
    for strategy in (None, armillary.MirroredStrategy()):
        config = estimator.RunConfig(train_distribute=strategy)
        with pytest.raises(EstimatorError, match="2 processes that train, and each"):
            estimator.LinearRegressor(COLUMNS, tmp_path, config=config)


def test_a_single_process_has_no_cluster():
    config = estimator.RunConfig()
    assert (config.task_type, config.task_id, config.is_chief) == ("worker", 0, True)
    assert config.num_worker_replicas == 1
    assert config.cluster_spec.jobs == []


@pytest.mark.slow
def test_an_evaluator_evaluates_and_does_not_train(tmp_path, monkeypatch):
    expected = make_regressor(tmp_path).train(make_input_fn(), max_steps=3)
    expected = expected.evaluate(make_input_fn())
    set_cluster(monkeypatch, "evaluator", ps=["127.0.0.1:2223"])
    made = estimator.LinearRegressor(COLUMNS, tmp_path, optimizer="SGD")
    with pytest.raises(EstimatorError, match="in the task evaluator 0, which does not"):
        made.train(make_input_fn(), steps=1)
    result, _ = estimator.train_and_evaluate(
        made,
        estimator.TrainSpec(make_input_fn(), max_steps=3),
        estimator.EvalSpec(make_input_fn()),
    )
    assert result == pytest.approx(expected, rel=1e-6)
