"""The estimators that come with the package, and the optimizers they are named."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from sklearn import metrics

from armillary import estimator
from armillary.estimator._canned import as_optimizer
from tests.estimator.problems import COLUMNS, X, Y, make_config, make_input_fn

BINARY = (Y > 0).astype("float32")
CLASSES = np.digitize(Y, [-1.0, 1.0]).astype("int32")


def sigmoid(values: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-values))


def rows_of(made: Any, key: str, labels: np.ndarray) -> np.ndarray:
    return np.array([row[key] for row in made.predict(make_input_fn(X, labels))])


@pytest.mark.slow
@pytest.mark.parametrize("replicas", [1, 2])
def test_a_binary_classifier_reports_what_tensorflow_does(tmp_path, replicas):
    made = estimator.LinearClassifier(
        COLUMNS, tmp_path, optimizer="SGD", config=make_config(replicas)
    ).train(make_input_fn(X, BINARY), steps=3)
    result = made.evaluate(make_input_fn(X, BINARY))

    logits = rows_of(made, "logits", BINARY)[:, 0]
    taken = (logits > 0).astype("float32")
    np.testing.assert_allclose(
        rows_of(made, "logistic", BINARY)[:, 0], sigmoid(logits), rtol=1e-5
    )
    np.testing.assert_array_equal(rows_of(made, "class_ids", BINARY)[:, 0], taken)
    probabilities = rows_of(made, "probabilities", BINARY)
    np.testing.assert_allclose(probabilities[:, 1], sigmoid(logits), rtol=1e-5)
    loss = metrics.log_loss(BINARY, sigmoid(logits))
    # Counted in buckets.
    area = metrics.roc_auc_score(BINARY, logits)
    assert result.pop("auc") == pytest.approx(area, abs=0.01)
    area = metrics.average_precision_score(BINARY, logits)
    assert result.pop("auc_precision_recall") == pytest.approx(area, abs=0.01)
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


def test_an_untrained_classifier_takes_class_0(tmp_path):
    made = estimator.LinearClassifier(COLUMNS, tmp_path, config=make_config())
    result = made.evaluate(make_input_fn(X, BINARY))
    assert result["recall"] == 0
    assert result["accuracy"] == pytest.approx(1 - BINARY.mean())


@pytest.mark.each_case
@pytest.mark.parametrize("label", [0, 1])
def test_labels_of_one_class_have_the_numbers_of_tensorflow(tmp_path, label):
    made = estimator.LinearClassifier(COLUMNS, tmp_path, config=make_config())
    result = made.evaluate(make_input_fn(X, np.full(len(X), label)))
    # `tf.keras.metrics.AUC` divides by the examples of a class, and 0 by 0 is 0.
    assert (result["auc"], result["auc_precision_recall"]) == (0, label)
    assert np.isfinite(list(result.values())).all()


@pytest.mark.slow
def test_a_linear_classifier_trains_as_a_loop_in_numpy_does(tmp_path):
    made = estimator.LinearClassifier(
        COLUMNS, tmp_path, n_classes=3, optimizer="SGD", config=make_config()
    ).train(make_input_fn(X, CLASSES), steps=18)

    weights, bias = np.zeros((3, 3)), np.zeros(3)
    for start in range(0, 72, 4):
        x, labels = X[start : start + 4], CLASSES[start : start + 4]
        scores = np.exp(x @ weights + bias)
        error = scores / scores.sum(axis=1, keepdims=True) - np.eye(3)[labels]
        weights -= 0.2 * x.T @ error / 4
        bias -= 0.2 * error.mean(axis=0)
    logits = rows_of(made, "logits", CLASSES)
    np.testing.assert_allclose(logits, X @ weights + bias, rtol=1e-4, atol=1e-5)
    result = made.evaluate(make_input_fn(X, CLASSES))
    assert result.keys() == {"accuracy", "average_loss", "loss", "global_step"}
    assert result["accuracy"] == pytest.approx(np.mean(logits.argmax(1) == CLASSES))
    taken = rows_of(made, "class_ids", CLASSES)
    np.testing.assert_array_equal(taken[:, 0], logits.argmax(1))


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["Adam", lambda: optax.adam(0.02)])
def test_networks_learn(tmp_path, optimizer):
    options = {"feature_columns": COLUMNS, "config": make_config(2)}
    classifier = estimator.DNNClassifier(
        [16, 16],
        model_dir=tmp_path / "classifier",
        n_classes=3,
        dropout=0.1,
        optimizer=optax.adam(0.02),
        **options,
    )
    classifier.train(make_input_fn(X, CLASSES, repeat=True), steps=150)
    assert classifier.evaluate(make_input_fn(X, CLASSES))["accuracy"] > 0.9

    regressor = estimator.DNNRegressor(
        [16],
        model_dir=tmp_path / "regressor",
        activation_fn=jnp.tanh,
        optimizer=optimizer,
        **options,
    )
    before = regressor.evaluate(make_input_fn())["average_loss"]
    regressor.train(make_input_fn(repeat=True), steps=150)
    assert regressor.evaluate(make_input_fn())["average_loss"] < 0.8 * before


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
def test_columns_normalize_and_reshape(tmp_path):
    columns = [
        estimator.numeric_column("a", normalizer_fn=lambda x: (x - 1) / 2),
        estimator.numeric_column("b", shape=(2,)),
    ]
    made = estimator.LinearRegressor(
        columns, tmp_path / "scaled", optimizer="SGD", config=make_config()
    ).train(make_input_fn(), steps=5)
    scaled = X.copy()
    scaled[:, 0] = (X[:, 0] - 1) / 2
    other = estimator.LinearRegressor(
        COLUMNS, tmp_path / "plain", optimizer="SGD", config=make_config()
    ).train(make_input_fn(scaled, Y), steps=5)
    result = other.evaluate(make_input_fn(scaled, Y))
    assert made.evaluate(make_input_fn()) == pytest.approx(result, rel=1e-5)


# As `tf.keras.optimizers.legacy` updates a parameter; `slots` keep what they sum up.
def keras_sgd(param, gradient, slots, rate, step):
    return param - rate * gradient


def keras_adagrad(param, gradient, slots, rate, step):
    slots["sum"] = slots.get("sum", 0.1) + gradient**2
    return param - rate * gradient / (np.sqrt(slots["sum"]) + 1e-7)


def keras_adam(param, gradient, slots, rate, step):
    slots["m"] = 0.9 * slots.get("m", 0) + 0.1 * gradient
    slots["v"] = 0.999 * slots.get("v", 0) + 0.001 * gradient**2
    rate = rate * np.sqrt(1 - 0.999**step) / (1 - 0.9**step)
    return param - rate * slots["m"] / (np.sqrt(slots["v"]) + 1e-7)


def keras_rmsprop(param, gradient, slots, rate, step):
    slots["v"] = 0.9 * slots.get("v", 0) + 0.1 * gradient**2
    return param - rate * gradient / (np.sqrt(slots["v"]) + 1e-7)


def keras_ftrl(param, gradient, slots, rate, step):
    before = slots.get("sum", 0.1)
    slots["sum"] = before + gradient**2
    sigma = (np.sqrt(slots["sum"]) - np.sqrt(before)) / rate
    slots["linear"] = slots.get("linear", 0.0) + gradient - sigma * param
    return -slots["linear"] / (np.sqrt(slots["sum"]) / rate)


@pytest.mark.parametrize(
    ("name", "update", "default"),
    [
        ("SGD", keras_sgd, 0.01),
        ("Adagrad", keras_adagrad, 0.001),
        ("Adam", keras_adam, 0.001),
        ("RMSProp", keras_rmsprop, 0.001),
        ("Ftrl", keras_ftrl, 0.001),
    ],
)
@pytest.mark.parametrize("rate", [None, 0.2])
def test_names_of_optimizers_mean_what_they_mean_in_tensorflow(
    name, update: Callable[..., Any], default, rate
):
    optimizer = as_optimizer(name, rate)
    param = jnp.array([0.5, -1.0, 2.0])
    expected, slots = np.asarray(param, np.float64), {}
    state = optimizer.init(param)
    for step in range(1, 6):
        gradient = np.sin(np.arange(3) + step)
        updates, state = optimizer.update(jnp.asarray(gradient), state, param)
        param = optax.apply_updates(param, updates)
        expected = update(expected, gradient, slots, rate or default, step)
    np.testing.assert_allclose(param, expected, rtol=1e-4, atol=1e-6)


def test_ftrl_sets_small_weights_to_zero():
    optimizer = estimator.ftrl(
        0.1, l1_regularization_strength=1.0, l2_regularization_strength=0.5
    )
    param = jnp.array([0.0, 0.0])
    state = optimizer.init(param)
    for _ in range(3):
        updates, state = optimizer.update(jnp.array([0.1, -2.0]), state, param)
        param = optax.apply_updates(param, updates)
    assert param[0] == 0
    # 0.1 + 3 * 4 squared, and what the corrected gradients have over the threshold.
    total, linear, weight = 0.1, 0.0, 0.0
    for _ in range(3):
        before, total = total, total + 4
        linear += -2 - (np.sqrt(total) - np.sqrt(before)) / 0.1 * weight
        weight = -(linear + 1) / (np.sqrt(total) / 0.1 + 2 * 0.5)
    assert float(param[1]) == pytest.approx(weight, rel=1e-5)
