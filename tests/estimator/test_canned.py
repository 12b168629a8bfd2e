"""Canned estimators: the guide's program, and plain loops to compare with."""

import json
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from sklearn import metrics

import armillary
from armillary import estimator
from armillary.errors import NonFiniteError
from tests.estimator.canned import COLUMNS, make_linear, rows_of, state_of
from tests.estimator.problems import (
    BATCH_SIZE,
    X,
    Y,
    batches_of,
    make_config,
    make_input_fn,
)
from tests.problems import assert_identical

BINARY = (Y > 0).astype("float32")


CLASSES = np.digitize(Y, [-1.0, 1.0]).astype("int32")


class LocalTPUStrategy(armillary.TPUStrategy):
    """The strategy of TPUs, on the virtual CPU devices of the tests."""

    _kind = "cpu"


def make_multi_worker(monkeypatch):
    config = {"cluster": {}, "task": {"type": "worker", "index": 0}}
    monkeypatch.setenv("TF_CONFIG", json.dumps(config))
    return armillary.MultiWorkerMirroredStrategy()


STRATEGIES: dict[str, Callable[[Any], Any]] = {
    "default": lambda _: armillary.get_strategy(),
    "one device": lambda _: armillary.OneDeviceStrategy("cpu:0"),
    "mirrored": lambda _: armillary.MirroredStrategy(jax.devices()[:4]),
    "multi worker": make_multi_worker,
    "central storage": lambda _: armillary.distribute.CentralStorageStrategy(),
    "tpu": lambda _: LocalTPUStrategy(),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", STRATEGIES)
def test_the_guides_program_prints_the_guides_numbers(name, monkeypatch):
    strategy = STRATEGIES[name](monkeypatch)

    config = armillary.estimator.RunConfig(
        train_distribute=strategy, eval_distribute=strategy
    )
    regressor = armillary.estimator.LinearRegressor(
        feature_columns=[armillary.estimator.numeric_column("feats")],
        optimizer="SGD",
        config=config,
    )

    def input_fn():
        arrays = ({"feats": np.ones((1000, 1))}, np.ones((1000, 1)))
        return armillary.data.from_arrays(arrays, batch_size=10)

    regressor.train(input_fn=input_fn, steps=10)
    result = regressor.evaluate(input_fn=input_fn, steps=10)

    assert result == {
        "average_loss": pytest.approx(1.4210855e-14, rel=1e-6),
        "loss": pytest.approx(1.4210855e-14, rel=1e-6),
        "label/mean": 1.0,
        # TensorFlow adds up in 32 bits, which rounds to 0.99999994.
        "prediction/mean": pytest.approx(0.99999994, rel=1e-7),
        "global_step": 10,
    }


@pytest.mark.slow
def test_lists_of_numbers_are_arrays(tmp_path):
    columns = [estimator.numeric_column("feats")]
    made = estimator.LinearRegressor(
        columns, tmp_path, optimizer="SGD", config=make_config()
    )

    def input_fn():
        for _ in range(3):
            yield {"feats": [1.0, 1.0]}, [1.0, 1.0]

    made.train(input_fn)
    made.train(lambda: [({"feats": [[1.0]]}, [[1.0]])] * 2)
    assert made.global_step == 5
    # The error is multiplied by 1 - 2 * 0.2 * 2 in each step.
    expected = 1 - 0.2**5
    prediction = next(made.predict(input_fn))["predictions"]
    assert prediction == pytest.approx([expected], rel=1e-6)


def make_dnn(folder, replicas, **options):
    options = {"n_classes": 3, "optimizer": optax.adam(0.02), **options}
    return estimator.DNNClassifier(
        [8, 4], COLUMNS, folder, config=make_config(replicas), **options
    )


@pytest.mark.slow
def test_a_linear_regressor_trains_as_a_loop_in_numpy_does(tmp_path):
    made = make_linear(tmp_path, 4).train(make_input_fn(), steps=4)
    weights, bias = np.zeros(3), 0.0
    for x, y in list(batches_of(X, Y, 4 * BATCH_SIZE))[:4]:
        error = x @ weights + bias - y
        weights -= 0.2 * 2 * x.T @ error / len(x)
        bias -= 0.2 * 2 * error.mean()
    found = rows_of(made, "predictions", Y)[:, 0]
    np.testing.assert_allclose(found, X @ weights + bias, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(("make", "labels"), [(make_linear, Y), (make_dnn, CLASSES)])
def test_four_replicas_train_as_one_device_on_the_joined_batch(tmp_path, make, labels):
    mirrored = make(tmp_path / "mirrored", 4)
    mirrored.train(make_input_fn(X, labels), steps=4)
    single = make(tmp_path / "single", 1)
    single.train(make_input_fn(X, labels, 4 * BATCH_SIZE), steps=4)

    found, expected = state_of(mirrored), state_of(single)
    assert found.keys() == expected.keys()
    for path, value in expected.items():
        if "dropout" not in path:  # Nothing is dropped, but a key is drawn.
            np.testing.assert_allclose(found[path], value, rtol=1e-4, atol=1e-6)

    inputs = make_input_fn(X, labels)
    result = mirrored.evaluate(inputs)
    assert result == pytest.approx(single.evaluate(inputs), rel=1e-4)


@pytest.mark.slow
def test_a_network_trains_as_a_loop_in_jax_and_optax_does(tmp_path):
    made = make_dnn(tmp_path / "made", 1)
    made.train(make_input_fn(X, CLASSES), steps=6)

    fresh = make_dnn(tmp_path / "fresh", 1)
    fresh.evaluate(make_input_fn(X, CLASSES), steps=1)
    layers = fresh._model.modules.network.layers
    params = [(each.kernel[...], each.bias[...]) for each in layers]

    def loss_fn(params, x, labels):
        for kernel, bias in params[:-1]:
            x = jax.nn.relu(x @ kernel + bias[None])
        kernel, bias = params[-1]
        scores = jax.nn.log_softmax(x @ kernel + bias[None])
        return -scores[jnp.arange(len(labels)), labels].mean()

    optimizer = optax.adam(0.02)
    state = optimizer.init(params)
    for x, labels in list(batches_of(X, CLASSES, BATCH_SIZE))[:6]:
        gradients = jax.grad(loss_fn)(params, x, labels)
        updates, state = optimizer.update(gradients, state)
        params = optax.apply_updates(params, updates)

    for layer, (kernel, bias) in zip(
        made._model.modules.network.layers, params, strict=True
    ):
        np.testing.assert_allclose(layer.kernel[...], kernel, rtol=1e-4, atol=1e-6)
        np.testing.assert_allclose(layer.bias[...], bias, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("replicas", [1, 2])
def test_a_resumed_training_equals_an_unbroken_one_bit_for_bit(tmp_path, replicas):
    input_fn = make_input_fn(X, CLASSES, shuffle_seed=3, repeat=True)
    whole = make_dnn(tmp_path / "whole", replicas, dropout=0.2)
    whole.train(input_fn, max_steps=12)

    first = make_dnn(tmp_path / "parts", replicas, dropout=0.2)
    first.train(input_fn, max_steps=5)
    second = make_dnn(tmp_path / "parts", replicas, dropout=0.2)
    second.train(input_fn, max_steps=12)

    assert second.global_step == 12
    assert_identical(state_of(whole), state_of(second))


def sigmoid(values: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-values))


@pytest.mark.slow
@pytest.mark.parametrize("replicas", [1, 2])
def test_a_binary_classifier_reports_what_tensorflow_does(tmp_path, replicas):
    made = estimator.LinearClassifier(
        COLUMNS, tmp_path, optimizer="SGD", config=make_config(replicas)
    ).train(make_input_fn(X, BINARY), steps=3)
    result = made.evaluate(make_input_fn(X, BINARY))

    logits = rows_of(made, "logits", BINARY)[:, 0]
    taken = (logits > 0).astype("float32")
    found = rows_of(made, "logistic", BINARY)[:, 0]
    np.testing.assert_allclose(found, sigmoid(logits), rtol=1e-5)
    found = rows_of(made, "class_ids", BINARY)[:, 0]
    np.testing.assert_array_equal(found, taken)
    probabilities = rows_of(made, "probabilities", BINARY)
    np.testing.assert_allclose(probabilities[:, 1], sigmoid(logits), rtol=1e-5)

    # Areas are counted in buckets of scores.
    area = metrics.roc_auc_score(BINARY, logits)
    assert result.pop("auc") == pytest.approx(area, abs=0.01)
    area = metrics.average_precision_score(BINARY, logits)
    assert result.pop("auc_precision_recall") == pytest.approx(area, abs=0.01)
    loss = metrics.log_loss(BINARY, sigmoid(logits))
    assert result == pytest.approx(
        {
            "accuracy": np.mean(taken == BINARY),
            "accuracy_baseline": max(BINARY.mean(), 1 - BINARY.mean()),
            "average_loss": loss,
            "label/mean": BINARY.mean(),
            "loss": loss,
            "precision": metrics.precision_score(BINARY, taken),
            "prediction/mean": sigmoid(logits).mean(),
            "recall": metrics.recall_score(BINARY, taken),
            "global_step": 3,
        },
        rel=1e-5,
    )


@pytest.mark.slow
@pytest.mark.parametrize("label", [0, 1])
def test_labels_of_one_class_have_the_numbers_of_tensorflow(tmp_path, label):
    made = estimator.LinearClassifier(COLUMNS, tmp_path, config=make_config())
    result = made.evaluate(make_input_fn(X, np.full(len(X), label)))
    # `tf.keras.metrics.AUC` divides by the examples of a class, and 0 by 0 is 0.
    assert (result["auc"], result["auc_precision_recall"]) == (0, label)
    assert np.isfinite(list(result.values())).all()


@pytest.mark.slow
def test_a_classifier_of_three_classes_trains_as_a_loop_in_numpy_does(tmp_path):
    made = estimator.LinearClassifier(
        COLUMNS, tmp_path, n_classes=3, optimizer="SGD", config=make_config()
    ).train(make_input_fn(X, CLASSES), steps=18)

    weights, bias = np.zeros((3, 3)), np.zeros(3)
    for x, labels in batches_of(X, CLASSES, BATCH_SIZE):
        scores = np.exp(x @ weights + bias)
        error = scores / scores.sum(axis=1, keepdims=True) - np.eye(3)[labels]
        weights -= 0.2 * x.T @ error / len(x)
        bias -= 0.2 * error.mean(axis=0)
    logits = rows_of(made, "logits", CLASSES)
    np.testing.assert_allclose(logits, X @ weights + bias, rtol=1e-4, atol=1e-5)

    result = made.evaluate(make_input_fn(X, CLASSES))
    assert result.keys() == {"accuracy", "average_loss", "loss", "global_step"}
    assert result["accuracy"] == pytest.approx(np.mean(logits.argmax(1) == CLASSES))


@pytest.mark.slow
def test_a_network_regresses_and_drops_values_in_training_alone(tmp_path):
    made = estimator.DNNRegressor(
        [16],
        COLUMNS,
        tmp_path,
        activation_fn=jnp.tanh,
        dropout=0.1,
        optimizer=lambda: optax.adam(0.02),
        config=make_config(2),
    )
    before = made.evaluate(make_input_fn())
    assert before == made.evaluate(make_input_fn())
    made.train(make_input_fn(repeat=True), steps=150)
    after = made.evaluate(make_input_fn())
    assert after["average_loss"] < 0.3 * before["average_loss"]


@pytest.mark.slow
def test_labels_of_several_numbers(tmp_path):
    labels = np.stack([Y, -Y], axis=1)
    made = estimator.LinearRegressor(
        COLUMNS, tmp_path, label_dimension=2, optimizer="SGD", config=make_config()
    ).train(make_input_fn(X, labels), steps=18)
    predictions = rows_of(made, "predictions", labels)
    np.testing.assert_allclose(predictions[:, 0], -predictions[:, 1], atol=1e-6)
    result = made.evaluate(make_input_fn(X, labels))
    expected = np.mean((predictions - labels) ** 2)
    assert result["average_loss"] == pytest.approx(expected, rel=1e-4)


@pytest.mark.slow
def test_baselines_learn_the_mean_and_the_shares_of_classes(tmp_path):
    regressor = estimator.BaselineRegressor(
        tmp_path / "regressor", optimizer="SGD", config=make_config(2)
    ).train(make_input_fn(batch_size=36), steps=1)
    # One step from 0, with the learning rate 0.3 and the gradient -2 * mean.
    expected = 0.6 * Y.mean()
    assert rows_of(regressor, "predictions", Y) == pytest.approx(expected, rel=1e-5)

    classifier = estimator.BaselineClassifier(
        tmp_path / "classifier",
        n_classes=3,
        optimizer=optax.sgd(1.0),
        config=make_config(),
    ).train(make_input_fn(X, CLASSES, 72, repeat=True), steps=60)
    shares = np.bincount(CLASSES) / len(CLASSES)
    found = rows_of(classifier, "probabilities", CLASSES)[0]
    np.testing.assert_allclose(found, shares, atol=0.01)


@pytest.mark.slow
def test_a_label_of_no_class_ends_training_with_the_rule(tmp_path):
    made = estimator.LinearClassifier(COLUMNS, tmp_path, config=make_config())
    with pytest.raises(NonFiniteError) as raised:
        made.train(make_input_fn(X, np.full(len(X), 2)), steps=1)
    assert "`n_classes` is 2" in "".join(raised.value.__notes__)
