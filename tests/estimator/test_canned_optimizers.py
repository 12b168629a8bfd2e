"""Tests of the optimizers and the arguments of canned estimators."""

import math

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import armillary
from armillary import estimator
from armillary.errors import EstimatorError
from armillary.estimator._optimizers import as_optimizer
from tests.estimator.canned import COLUMNS, make_linear, rows_of, state_of
from tests.estimator.problems import (
    X,
    Y,
    make_config,
    make_input_fn,
)
from tests.problems import assert_identical


# Each function updates a parameter as `tf.keras.optimizers.legacy` documents it.
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
        ("rmsprop", keras_rmsprop, 0.001),
    ],
)
@pytest.mark.parametrize("rate", [None, 0.2])
def test_a_named_optimizer_updates_as_its_formula_says(name, update, default, rate):
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


def assert_same_training(first, second, data):
    first.train(lambda: data, steps=3)
    second.train(lambda: data, steps=3)
    assert_identical(state_of(first), state_of(second))


@pytest.mark.slow
def test_linear_estimators_have_ftrl_by_default_as_in_tensorflow(tmp_path):
    names = [f"x{i}" for i in range(36)]
    columns = [estimator.numeric_column(name) for name in names]
    rows = dict.fromkeys(names, X[:, 0])
    data = armillary.data.from_arrays((rows, Y), batch_size=8)

    def make(folder, **options):
        return estimator.LinearRegressor(
            columns, tmp_path / folder, config=make_config(), **options
        )

    expected = make("b", optimizer=estimator.ftrl(0.2))
    assert_same_training(make("a"), expected, data)
    # Without a name, the rate falls with the number of columns.
    expected = make("d", optimizer=estimator.ftrl(1 / math.sqrt(36)))
    assert_same_training(make("c", optimizer=None), expected, data)


@pytest.mark.slow
def test_networks_have_adagrad_by_default_as_in_tensorflow(tmp_path):
    adagrad = optax.adagrad(0.001, initial_accumulator_value=0.1, eps=1e-7)

    def make(folder, **options):
        return estimator.DNNRegressor(
            [4], COLUMNS, tmp_path / folder, config=make_config(), **options
        )

    expected = make("b", optimizer=adagrad)
    assert_same_training(make("a"), expected, make_input_fn()())


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
    # The sum of squares begins at 0.1, and grows by 4 in each step.
    total, linear, weight = 0.1, 0.0, 0.0
    for _ in range(3):
        before, total = total, total + 4
        linear += -2 - (np.sqrt(total) - np.sqrt(before)) / 0.1 * weight
        weight = -(linear + 1) / (np.sqrt(total) / 0.1 + 2 * 0.5)
    assert float(param[1]) == pytest.approx(weight, rel=1e-5)


def test_ftrl_waits_for_a_first_gradient():
    optimizer = estimator.ftrl(0.1, initial_accumulator_value=0)
    param = jnp.array([3.0])
    updates, _ = optimizer.update(jnp.array([0.0]), optimizer.init(param), param)
    assert updates[0] == 0
    with pytest.raises(ValueError, match="`learning_rate` is 0"):
        estimator.ftrl(0)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: estimator.LinearRegressor([]), "`feature_columns` has no column"),
        (lambda: estimator.LinearRegressor(["x"]), "`feature_columns` has 'x'"),
        (lambda: estimator.LinearRegressor(COLUMNS * 2), r"\['a', 'b'\] more than"),
        (
            lambda: estimator.LinearRegressor(COLUMNS, optimizer="Nadam"),
            "`optimizer` is 'Nadam'.*'Adagrad'",
        ),
        (
            lambda: estimator.LinearClassifier(COLUMNS, n_classes=1),
            "`n_classes` is 1",
        ),
        (lambda: estimator.BaselineClassifier(n_classes=0), "`n_classes` is 0"),
        (lambda: estimator.DNNRegressor([], COLUMNS), r"`hidden_units` is \[\]"),
        (
            lambda: estimator.DNNClassifier([4], COLUMNS, dropout=1.0),
            "`dropout` is 1.0",
        ),
        (
            lambda: estimator.DNNRegressor(
                [4], [estimator.categorical_column_with_identity("c", 3)]
            ),
            "`feature_columns` has the categorical column 'c'.*indicator_column",
        ),
    ],
)
def test_wrong_arguments_are_named(make, message):
    with pytest.raises(EstimatorError, match=message):
        make()


@pytest.mark.parametrize(
    ("features", "labels", "message"),
    [
        (X, Y, "The features are of type"),
        ({"a": X[:, 0]}, Y, "The features have no 'b'"),
        ({"a": X, "b": X[:, 1:]}, Y, r"The feature 'a' has the shape \(3,\)"),
        ({"a": X[:, 0], "b": X[:, 1:]}, X, r"The labels have the shape \(72, 3\)"),
    ],
)
def test_features_and_labels_that_do_not_fit_are_named(
    tmp_path, features, labels, message
):
    made = estimator.LinearRegressor(COLUMNS, tmp_path, config=make_config())
    data = armillary.data.from_arrays((features, labels), batch_size=72)
    with pytest.raises(EstimatorError, match=message):
        made.train(lambda: data, steps=1)


def test_classes_are_integers(tmp_path):
    made = estimator.LinearClassifier(
        COLUMNS, tmp_path, n_classes=3, config=make_config()
    )
    with pytest.raises(EstimatorError, match="labels of 3 classes"):
        made.train(make_input_fn(X, Y), steps=1)


@pytest.mark.slow
def test_modules_of_canned_estimators_can_be_read_from_a_checkpoint(tmp_path):
    made = make_linear(tmp_path, 1).train(make_input_fn(), steps=3)
    linear = nnx.Linear(3, 1, rngs=nnx.Rngs(0))
    checkpoint = armillary.Checkpoint(model={"network": {"linear": linear}})
    path = made.latest_checkpoint()
    assert path is not None
    checkpoint.read(path, only="model/network/linear")
    expected = rows_of(made, "predictions", Y)
    np.testing.assert_allclose(linear(X), expected, rtol=1e-5, atol=1e-6)
