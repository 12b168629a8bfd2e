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


@pytest.mark.parametrize(
    ("method", "name", "answer"),
    [
        ("train", "hooks", "Leave it out: there is no session"),
        ("train", "saving_listeners", "Leave it out: there is no session"),
        ("train", "step", "Did you mean `steps`?"),
        ("evaluate", "hooks", "Leave it out: there is no session"),
        ("predict", "hooks", "Leave it out: there is no session"),
        ("predict", "predict_keys", "Take the entries that you need"),
    ],
)
def test_keywords_of_tensorflow_are_answered_when_a_method_is_called(
    tmp_path, method, name, answer
):
    call = getattr(make_regressor(tmp_path), method)
    message = rf"`{name}` is None, but `Estimator.{method}` has .* {re.escape(answer)}"
    with pytest.raises(TypeError, match=message):
        call(make_input_fn(), **{name: None})


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


@pytest.mark.each_case
@pytest.mark.slow
@pytest.mark.parametrize(
    ("count", "label", "rule"),
    [
        (2, 9, "A label that is not 0 or 1 is such a value: `n_classes` is 2."),
        (2, -1, "Pass the number of classes that there are, `n_classes=`."),
        (5, 9, "not one of 0 to 4 is such a value: `n_classes` is 5."),
        (5, -1, "not one of 0 to 4"),
    ],
)
def test_a_label_of_no_class_ends_training(tmp_path, count, label, rule):
    labels = np.zeros(len(X), "int32")
    labels[-1] = label
    classifier = estimator.LinearClassifier(COLUMNS, tmp_path, n_classes=count)
    with pytest.raises(NonFiniteError) as caught:
        classifier.train(make_input_fn(X, labels))
    assert rule in caught.value.__notes__[-1]


@pytest.mark.parametrize(
    ("kind", "arguments", "error", "message"),
    [
        ("LinearRegressor", {"optimizer": "Lion"}, EstimatorError, "'Lion', but it"),
        ("LinearRegressor", {"optimizer": 0.1}, EstimatorError, "`optimizer` is 0.1"),
        ("LinearRegressor", {"label_dimension": 0}, ValueError, "`label_dimension`"),
        ("LinearClassifier", {"n_classes": 1}, EstimatorError, "`n_classes` is 1"),
        ("LinearRegressor", {"weight_column": "w"}, TypeError, "no such argument"),
        ("LinearRegressor", {"config": {}}, TypeError, "`config` is {}"),
        ("DNNClassifier", {"hidden_units": 8}, EstimatorError, "`hidden_units` is 8"),
        ("DNNRegressor", {"dropout": 1.5}, EstimatorError, "`dropout` is 1.5"),
        ("DNNRegressor", {"activation_fn": "relu"}, TypeError, "must be callable"),
        ("DNNRegressor", {"label_dimension": 0}, ValueError, "`label_dimension`"),
        (
            "LinearRegressor",
            {"feature_columns": ["a"]},
            EstimatorError,
            "`feature_columns` is ['a'], but it must be a list",
        ),
        ("LinearRegressor", {"feature_columns": []}, EstimatorError, "is []"),
    ],
)
def test_arguments_of_canned_estimators(tmp_path, kind, arguments, error, message):
    defaults = {"feature_columns": COLUMNS, "model_dir": tmp_path}
    if kind.startswith("DNN"):
        defaults["hidden_units"] = [4]
    with pytest.raises(error, match=re.escape(message)):
        getattr(estimator, kind)(**{**defaults, **arguments})


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: estimator.Estimator(None), TypeError, "`model_fn` is None of type"),
        (
            lambda: estimator.Estimator(no_labels, warm_start_from="run"),
            TypeError,
            "`Estimator` has no such argument. `make_fn`",
        ),
        (
            lambda: estimator.Estimator(no_labels, 3),
            TypeError,
            "`model_dir` is 3 of type int",
        ),
        (lambda: estimator.RunConfig(""), ValueError, "`model_dir` is '', but it must"),
        (lambda: estimator.RunConfig(3), TypeError, "`model_dir` is 3 of type int"),
        (
            lambda: estimator.RunConfig(keep_checkpoint_every_n_hours=-1),
            ValueError,
            "`keep_checkpoint_every_n_hours` is -1",
        ),
        (
            lambda: estimator.RunConfig().replace(device_fn=None),
            TypeError,
            "Leave it out: there is no session here",
        ),
        (
            lambda: EstimatorSpec(ModeKeys.TRAIN, training_hooks=[]),
            TypeError,
            "`EstimatorSpec` has no such argument. Leave it out: there is no session",
        ),
        (
            lambda: EstimatorSpec(ModeKeys.PREDICT, export_outputs={}),
            TypeError,
            "`armillary.actions.ExportModel`",
        ),
        (
            lambda: EstimatorSpec(ModeKeys.TRAIN, scaffold=None),
            TypeError,
            "`make_fn` of `modules.make` sets a module up",
        ),
        (lambda: estimator.EvalSpec(min, name=1), TypeError, "`name` is 1 of type int"),
        (lambda: numeric_column(3), ValueError, "`key` is 3"),
        (lambda: numeric_column("a", (0,)), ValueError, "`shape` is (0,)"),
        (lambda: numeric_column("a", normalizer_fn=2), TypeError, "be callable"),
        (lambda: estimator.TrainSpec(3), TypeError, "`input_fn` is 3"),
        (lambda: estimator.TrainSpec(min, 0), ValueError, "`max_steps` is 0"),
        (lambda: estimator.EvalSpec(3), TypeError, "`input_fn` is 3"),
        (lambda: estimator.EvalSpec(min, 0), ValueError, "`steps` is 0"),
        (
            lambda: estimator.EvalSpec(min, throttle_secs=1),
            TypeError,
            "each checkpoint is evaluated",
        ),
        (lambda: estimator.RunConfig(keep_checkpoint_max=-1), ValueError, "is -1"),
        (lambda: estimator.RunConfig(log_step_count_steps=0), ValueError, "is 0"),
        (lambda: estimator.RunConfig(save_summary_steps=0), ValueError, "is 0"),
        (lambda: estimator.RunConfig(train_distribute=2), TypeError, "a `Strategy`"),
        (
            lambda: estimator.RunConfig(save_checkpoints_secs=60),
            TypeError,
            "Use `save_checkpoints_steps`",
        ),
        (
            lambda: estimator.train_and_evaluate(3, None, None),
            TypeError,
            "`estimator` is 3",
        ),
    ],
)
def test_arguments(call, error, message):
    with pytest.raises(error, match=re.escape(message)):
        call()


def test_steps(tmp_path):
    made = make_regressor(tmp_path)
    with pytest.raises(ValueError, match="`steps` is 1 and `max_steps` is 2, but only"):
        made.train(make_input_fn(), steps=1, max_steps=2)
    for arguments in ({"steps": 0}, {"max_steps": -1}):
        with pytest.raises(ValueError, match="must be a positive integer"):
            made.train(make_input_fn(), **arguments)
    with pytest.raises(ValueError, match="`steps` is 0"):
        made.evaluate(make_input_fn(), steps=0)
    for call in (made.train, made.predict):
        with pytest.raises(TypeError, match="`input_fn` is 3"):
            call(3)
    for call in (made.evaluate, made.predict):
        with pytest.raises(TypeError, match="`checkpoint_path` is 3 of type int"):
            call(make_input_fn(), checkpoint_path=3)
    with pytest.raises(TypeError, match="`name` is 3 of type int"):
        made.evaluate(make_input_fn(), name=3)


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
