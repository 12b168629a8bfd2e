"""Canned estimators: linear models and networks that need no model function.

Each one is an `Estimator` whose model function is written here: columns turn features
into numbers, a module turns these into logits, and a head turns logits into
predictions, a loss and metrics. Learning rates and the names of metrics are as in
TensorFlow 2.
"""

import functools
import itertools
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from armillary._checks import (
    check_callable,
    check_not_negative,
    check_positive_int,
    is_positive_int,
)
from armillary.errors import EstimatorError
from armillary.estimator._columns import DenseColumn, InputLayer, as_dense
from armillary.estimator._estimator import Estimator
from armillary.estimator._model_fn import EstimatorSpec, ModeKeys
from armillary.estimator._run_config import RunConfig
from armillary.metrics._labeled import AUC, Precision, Recall

StrPath = str | os.PathLike[str]

_LINEAR_RATE = 0.2
"""The learning rate of a linear estimator whose optimizer is named."""
_BASELINE_RATE = 0.3
"""The learning rate of a baseline whose optimizer is named."""
_EPSILON = 1e-7
"""The epsilon of Keras' optimizers."""


# --- Optimizers, by name ---


class FtrlState(NamedTuple):
    """State of `ftrl`: sums of squared gradients, and of corrected gradients."""

    accumulators: optax.Updates
    linear: optax.Updates


def ftrl(
    learning_rate: float,
    *,
    initial_accumulator_value: float = 0.1,
    l1_regularization_strength: float = 0.0,
    l2_regularization_strength: float = 0.0,
) -> optax.GradientTransformation:
    """Returns FTRL-Proximal as an Optax transformation (`tf.keras.optimizers.Ftrl`).

    After McMahan et al., "Ad Click Prediction: a View from the Trenches". The learning
    rate of each weight falls with the square root of its summed squared gradients.

    Args:
        learning_rate: The learning rate.
        initial_accumulator_value: The first value of the sums of squared gradients.
        l1_regularization_strength: Sets small weights to exactly 0.
        l2_regularization_strength: Pulls weights towards 0.

    Returns:
        The transformation. Its `update` needs the parameters.

    Raises:
        ValueError: If a number is negative, or the learning rate is 0.
    """
    rate = check_not_negative("learning_rate", learning_rate)
    if not rate:
        raise ValueError(
            "`learning_rate` is 0, by which FTRL divides. Use `learning_rate=0.05`."
        )
    first = check_not_negative("initial_accumulator_value", initial_accumulator_value)
    l1 = check_not_negative("l1_regularization_strength", l1_regularization_strength)
    l2 = check_not_negative("l2_regularization_strength", l2_regularization_strength)

    def init_fn(params: optax.Params) -> FtrlState:
        def fill(param: Any) -> jax.Array:
            return jnp.full_like(param, first)

        linear = jax.tree.map(jnp.zeros_like, params)
        return FtrlState(jax.tree.map(fill, params), linear)

    def update_leaf(gradient: Any, total: Any, linear: Any, param: Any) -> Any:
        new_total = total + gradient**2
        sigma = (jnp.sqrt(new_total) - jnp.sqrt(total)) / rate
        new_linear = linear + gradient - sigma * param

        quadratic = jnp.sqrt(new_total) / rate + 2 * l2
        is_still = quadratic == 0  # No gradient has come yet.
        shrunk = jnp.clip(new_linear, -l1, l1)
        new_param = (shrunk - new_linear) / jnp.where(is_still, 1, quadratic)
        update = jnp.where(is_still, 0, new_param - param)
        return update, new_total, new_linear

    def update_fn(
        updates: optax.Updates, state: FtrlState, params: optax.Params | None = None
    ) -> tuple[optax.Updates, FtrlState]:
        found = jax.tree.map(update_leaf, updates, *state, params)
        outer = jax.tree.structure(updates)
        inner = jax.tree.structure((0, 0, 0))
        new, totals, linear = jax.tree.transpose(outer, inner, found)
        return new, FtrlState(totals, linear)

    return optax.GradientTransformation(init_fn, cast(Any, update_fn))


class _Named(NamedTuple):
    """An optimizer that a name stands for, with the learning rate of Keras."""

    make: Callable[..., optax.GradientTransformation]
    learning_rate: float


_BY_NAME = {
    "Adagrad": _Named(
        functools.partial(optax.adagrad, initial_accumulator_value=0.1, eps=_EPSILON),
        0.001,
    ),
    "Adam": _Named(functools.partial(optax.adam, eps=_EPSILON), 0.001),
    "Ftrl": _Named(ftrl, 0.001),
    "RMSProp": _Named(
        functools.partial(optax.rmsprop, decay=0.9, eps=_EPSILON, eps_in_sqrt=False),
        0.001,
    ),
    "SGD": _Named(optax.sgd, 0.01),
}


def as_optimizer(
    optimizer: Any, learning_rate: float | None = None
) -> optax.GradientTransformation:
    """Returns an optimizer, from itself, from a function that makes it, or by name.

    Args:
        optimizer: The argument of the user.
        learning_rate: The rate of an optimizer that is named. `None` takes Keras' own.
    """
    if isinstance(optimizer, str):
        by_name = {name.lower(): named for name, named in _BY_NAME.items()}
        named = by_name.get(optimizer.lower())
        if named is not None:
            rate = named.learning_rate if learning_rate is None else learning_rate
            return named.make(rate)
    made = optimizer() if callable(optimizer) else optimizer
    if not isinstance(made, optax.GradientTransformation):
        names = ", ".join(map(repr, _BY_NAME))
        raise EstimatorError(
            f"`optimizer` is {optimizer!r:.80}, but it must be an Optax "
            "transformation, a function without arguments that returns one, or one of "
            f"the names {names}. Write `optimizer=optax.adam(0.001)`."
        )
    return made


# --- Heads: from logits to predictions, a loss and metrics ---


@dataclass(frozen=True)
class Head:
    """The meaning of logits of shape `(batch, num_logits)`.

    Args:
        num_logits: How many logits an example has.
        predict: Makes the predictions from logits.
        evaluate: Makes losses and metrics from logits and labels.
        label_rule: Which labels are right. The loss of any other label is NaN, since
            nothing can be raised on a device.
    """

    num_logits: int
    predict: Callable[[jax.Array], dict[str, jax.Array]]
    evaluate: Callable[[jax.Array, Any], tuple[jax.Array, dict[str, Any]]]
    label_rule: str | None = None

    def make_spec(
        self,
        mode: ModeKeys,
        logits: jax.Array,
        labels: Any,
        optimizer: optax.GradientTransformation,
    ) -> EstimatorSpec:
        """Returns the spec of a model function with this head."""
        predictions = self.predict(logits)
        if mode is ModeKeys.PREDICT:
            return EstimatorSpec(mode, predictions)
        losses, metrics = self.evaluate(logits, labels)
        return EstimatorSpec(
            mode,
            predictions,
            loss=losses.mean(),
            train_op=optimizer,
            eval_metric_ops={"average_loss": losses, **metrics},
        )


def _regression_head(label_dimension: Any) -> Head:
    """Returns squared errors, one for each number of a label."""
    size = check_positive_int("label_dimension", label_dimension)

    def predict(logits: jax.Array) -> dict[str, jax.Array]:
        return {"predictions": logits}

    def evaluate(logits: jax.Array, labels: Any) -> tuple[jax.Array, dict[str, Any]]:
        labels = _match(labels, size).astype(jnp.float32)
        metrics = {"label/mean": labels, "prediction/mean": logits}
        return jnp.square(logits - labels), metrics

    return Head(size, predict, evaluate)


def _class_head(n_classes: Any) -> Head:
    """Returns cross-entropy; two classes have one logit, for class 1."""
    if not is_positive_int(n_classes) or n_classes == 1:
        raise EstimatorError(
            f"`n_classes` is {n_classes!r}, but there must be 2 classes or more. Use "
            "`n_classes=2` for labels 0 and 1."
        )
    count = int(n_classes)
    labels = "0 or 1" if count == 2 else f"one of 0 to {count - 1}"
    rule = (
        f"The loss is also NaN for a label that is not {labels}: `n_classes` is "
        f"{count}. Pass the number of classes in the labels as `n_classes=`."
    )
    if count == 2:
        return Head(1, _predict_two, _evaluate_two, rule)
    return Head(count, _predict_many, _evaluate_many, rule)


def _predict_two(logits: jax.Array) -> dict[str, jax.Array]:
    pair = jnp.concatenate([jnp.zeros_like(logits), logits], axis=-1)
    logistic = jax.nn.sigmoid(logits)
    return {"logistic": logistic, **_predict_many(pair), "logits": logits}


def _predict_many(logits: jax.Array) -> dict[str, jax.Array]:
    return {
        "logits": logits,
        "probabilities": jax.nn.softmax(logits),
        "class_ids": logits.argmax(axis=-1, keepdims=True),
    }


def _evaluate_two(logits: jax.Array, labels: Any) -> tuple[jax.Array, dict[str, Any]]:
    labels = _match(labels, 1).astype(jnp.float32)
    predictions = _predict_two(logits)
    class_ids = predictions["class_ids"]

    # The metrics count -1 as a label of no class, and refuse to compute.
    is_class = (labels == 0) | (labels == 1)
    numbers = jnp.where(is_class, labels, -1).astype(jnp.int32)
    taken = {"logits": class_ids.astype(jnp.float32), "labels": numbers}
    scored = {"logits": logits, "labels": numbers}

    metrics = {
        "accuracy": (class_ids == labels).astype(jnp.float32),
        "accuracy_baseline": (_AccuracyBaseline, {"values": labels}),
        "auc": (_AUC, scored),
        "auc_precision_recall": (functools.partial(_AUC, "PR"), scored),
        "label/mean": labels,
        "precision": (functools.partial(Precision, threshold=0.5), taken),
        "prediction/mean": predictions["logistic"],
        "recall": (functools.partial(Recall, threshold=0.5), taken),
    }
    losses = optax.sigmoid_binary_cross_entropy(logits, labels)
    return jnp.where(is_class, losses, jnp.nan), metrics


def _evaluate_many(logits: jax.Array, labels: Any) -> tuple[jax.Array, dict[str, Any]]:
    labels = _match(labels, 1)
    count = logits.shape[-1]
    if not jnp.issubdtype(labels.dtype, jnp.integer):
        raise EstimatorError(
            f"The labels have the dtype {labels.dtype}, but labels of {count} classes "
            "must be integers from 0 on. Convert them in `input_fn`: "
            '`labels.astype("int32")`.'
        )
    labels = labels[:, 0]
    is_class = (labels >= 0) & (labels < count)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    accuracy = (logits.argmax(axis=-1) == labels).astype(jnp.float32)
    return jnp.where(is_class, losses, jnp.nan), {"accuracy": accuracy}


def _match(labels: Any, size: int) -> jax.Array:
    """Returns labels of shape `(batch, size)`."""
    if labels is None:
        raise EstimatorError(
            "The labels are None, but training and evaluation need them. Return "
            "batches `(features, labels)` from `input_fn`."
        )
    labels = jnp.asarray(labels)
    if labels.ndim == 1 and size == 1:
        labels = labels[:, None]
    if labels.ndim != 2 or labels.shape[1] != size:
        other = " or (batch,)" if size == 1 else ""
        raise EstimatorError(
            f"The labels have the shape {labels.shape}, but it must be (batch, {size})"
            f"{other}. Reshape them in `input_fn`."
        )
    return labels


class _AccuracyBaseline(nnx.metrics.Average):
    """The accuracy of always predicting the more frequent of two classes."""

    def compute(self) -> jax.Array:
        mean = super().compute()
        return jnp.maximum(mean, 1 - mean)


class _AUC(AUC):
    """The area under a curve, with TensorFlow's number if all labels are alike."""

    def compute(self) -> float:
        area = super().compute()
        if not math.isnan(area):
            return area
        _, positive = self.counts.read()
        return float(self.curve == "PR" and positive.any())


# --- Modules: from features to logits ---


class _Linear(nnx.Module):
    """A linear layer that begins at zero, as TensorFlow's linear models do."""

    def __init__(
        self, columns: tuple[DenseColumn, ...], num_logits: int, rngs: nnx.Rngs
    ) -> None:
        zeros = nnx.initializers.zeros_init()
        size = sum(column.num_inputs for column in columns)
        self.inputs = InputLayer(columns, rngs)
        self.linear = nnx.Linear(size, num_logits, kernel_init=zeros, rngs=rngs)

    def __call__(self, features: Any, *, training: bool) -> jax.Array:
        del training
        return self.linear(self.inputs(features))


class _Network(nnx.Module):
    """Dense layers, with dropout after the hidden layers."""

    def __init__(
        self,
        columns: tuple[DenseColumn, ...],
        num_logits: int,
        rngs: nnx.Rngs,
        *,
        hidden_units: Sequence[int],
        activation_fn: Callable[[jax.Array], jax.Array],
        dropout: float | None,
    ) -> None:
        first = sum(column.num_inputs for column in columns)
        sizes = [first, *hidden_units, num_logits]
        glorot = nnx.initializers.glorot_uniform()
        self.inputs = InputLayer(columns, rngs)
        self.layers = nnx.List(
            nnx.Linear(*pair, kernel_init=glorot, rngs=rngs)
            for pair in itertools.pairwise(sizes)
        )
        self.dropout = nnx.Dropout(dropout or 0.0, rngs=rngs)
        self.activation_fn = activation_fn

    def __call__(self, features: Any, *, training: bool) -> jax.Array:
        values = self.inputs(features)
        *hidden, last = self.layers
        for layer in hidden:
            values = self.activation_fn(layer(values))
            values = self.dropout(values, deterministic=not training)
        return last(values)


class _Bias(nnx.Module):
    """The same logits for every example."""

    def __init__(self, columns: Any, num_logits: int, rngs: nnx.Rngs) -> None:
        del columns, rngs
        self.bias = nnx.Param(jnp.zeros(num_logits))

    def __call__(self, features: Any, *, training: bool) -> jax.Array:
        del training
        count = jax.tree.leaves(features)[0].shape[0]
        return jnp.tile(self.bias[...], (count, 1))


# --- Estimators ---


class _CannedEstimator(Estimator):
    """An estimator of columns, a module and a head."""

    def __init__(
        self,
        make_network: Callable[..., Any],
        columns: tuple[DenseColumn, ...],
        head: Head,
        optimizer: optax.GradientTransformation,
        *,
        model_dir: StrPath | None,
        config: RunConfig | None,
        warm_start_from: StrPath | None,
    ) -> None:
        def model_fn(
            features: Any, labels: Any, mode: ModeKeys, modules: Any
        ) -> EstimatorSpec:
            def make(rngs: nnx.Rngs) -> Any:
                return make_network(columns, head.num_logits, rngs)

            network = modules.make("network", make)
            logits = network(features, training=mode is ModeKeys.TRAIN)
            return head.make_spec(mode, logits, labels, optimizer)

        super().__init__(model_fn, model_dir, config, warm_start_from=warm_start_from)
        self._label_rule = head.label_rule


class LinearRegressor(_CannedEstimator):
    """Linear regression of columns (`tf.estimator.LinearRegressor`).

    The loss is the mean squared error. An evaluation reports `average_loss`, `loss`,
    `label/mean`, `prediction/mean` and `global_step`. A prediction is a dictionary with
    `predictions`, shape `(label_dimension,)`.

    Args:
        feature_columns: The columns that are read, for example
            `[numeric_column("x")]`.
        model_dir: As in `Estimator`.
        label_dimension: How many numbers a label has.
        optimizer: An Optax transformation, a function without arguments that returns
            one, or one of the names `"Adagrad"`, `"Adam"`, `"Ftrl"`, `"RMSProp"` and
            `"SGD"`, in any case. A named optimizer has the learning rate 0.2. `None` is
            FTRL with 0.2, or `1 / sqrt(number of columns)` if that is less.
        config: As in `Estimator`.
        warm_start_from: As in `Estimator`.

    Raises:
        EstimatorError: If a column or the optimizer is of another kind.
        ValueError: If `label_dimension` is not positive.
    """

    def __init__(
        self,
        feature_columns: Any,
        model_dir: StrPath | None = None,
        *,
        label_dimension: int = 1,
        optimizer: Any = "Ftrl",
        config: RunConfig | None = None,
        warm_start_from: StrPath | None = None,
    ) -> None:
        columns = as_dense(feature_columns, is_linear=True)
        super().__init__(
            _Linear,
            columns,
            _regression_head(label_dimension),
            _linear_optimizer(optimizer, columns),
            model_dir=model_dir,
            config=config,
            warm_start_from=warm_start_from,
        )


class LinearClassifier(_CannedEstimator):
    """Logistic regression of columns (`tf.estimator.LinearClassifier`).

    The loss is the mean cross-entropy. An evaluation reports `accuracy`,
    `average_loss`, `loss` and `global_step`; with two classes also
    `accuracy_baseline`, `auc`, `auc_precision_recall`, `label/mean`, `precision`,
    `prediction/mean` and `recall`. A prediction is a dictionary with `logits`,
    `probabilities` and `class_ids`; with two classes also `logistic`.

    Args:
        feature_columns: As in `LinearRegressor`.
        model_dir: As in `Estimator`.
        n_classes: How many classes there are. Labels are integers from 0 to
            `n_classes - 1`.
        optimizer: As in `LinearRegressor`.
        config: As in `Estimator`.
        warm_start_from: As in `Estimator`.

    Raises:
        EstimatorError: As in `LinearRegressor`, or if there are fewer than two classes.
    """

    def __init__(
        self,
        feature_columns: Any,
        model_dir: StrPath | None = None,
        *,
        n_classes: int = 2,
        optimizer: Any = "Ftrl",
        config: RunConfig | None = None,
        warm_start_from: StrPath | None = None,
    ) -> None:
        columns = as_dense(feature_columns, is_linear=True)
        super().__init__(
            _Linear,
            columns,
            _class_head(n_classes),
            _linear_optimizer(optimizer, columns),
            model_dir=model_dir,
            config=config,
            warm_start_from=warm_start_from,
        )


class DNNRegressor(_CannedEstimator):
    """Regression by a dense network (`tf.estimator.DNNRegressor`).

    Loss, metrics and predictions are as in `LinearRegressor`.

    Args:
        hidden_units: The size of each hidden layer, for example `[64, 32]`.
        feature_columns: The columns that are read; a categorical column must be wrapped
            in `indicator_column` or `embedding_column`.
        model_dir: As in `Estimator`.
        label_dimension: How many numbers a label has.
        optimizer: As in `LinearRegressor`, but a named optimizer has the learning rate
            of Keras: 0.01 for `"SGD"`, and 0.001 for the others.
        activation_fn: Applied after each hidden layer.
        dropout: The share of hidden values that training drops; `None` for none.
        config: As in `Estimator`.
        warm_start_from: As in `Estimator`.

    Raises:
        EstimatorError: If a column, the optimizer, `hidden_units` or `dropout` is of
            another kind.
        ValueError: If `label_dimension` is not positive.
        TypeError: If `activation_fn` cannot be called.
    """

    def __init__(
        self,
        hidden_units: Sequence[int],
        feature_columns: Any,
        model_dir: StrPath | None = None,
        *,
        label_dimension: int = 1,
        optimizer: Any = "Adagrad",
        activation_fn: Callable[[jax.Array], jax.Array] = jax.nn.relu,
        dropout: float | None = None,
        config: RunConfig | None = None,
        warm_start_from: StrPath | None = None,
    ) -> None:
        super().__init__(
            _network(hidden_units, activation_fn, dropout),
            as_dense(feature_columns, is_linear=False),
            _regression_head(label_dimension),
            as_optimizer(optimizer),
            model_dir=model_dir,
            config=config,
            warm_start_from=warm_start_from,
        )


class DNNClassifier(_CannedEstimator):
    """Classification by a dense network (`tf.estimator.DNNClassifier`).

    Loss, metrics and predictions are as in `LinearClassifier`.

    Args:
        hidden_units: As in `DNNRegressor`.
        feature_columns: As in `DNNRegressor`.
        model_dir: As in `Estimator`.
        n_classes: As in `LinearClassifier`.
        optimizer: As in `DNNRegressor`.
        activation_fn: As in `DNNRegressor`.
        dropout: As in `DNNRegressor`.
        config: As in `Estimator`.
        warm_start_from: As in `Estimator`.

    Raises:
        EstimatorError: As in `DNNRegressor`, or if there are fewer than two classes.
        TypeError: If `activation_fn` cannot be called.
    """

    def __init__(
        self,
        hidden_units: Sequence[int],
        feature_columns: Any,
        model_dir: StrPath | None = None,
        *,
        n_classes: int = 2,
        optimizer: Any = "Adagrad",
        activation_fn: Callable[[jax.Array], jax.Array] = jax.nn.relu,
        dropout: float | None = None,
        config: RunConfig | None = None,
        warm_start_from: StrPath | None = None,
    ) -> None:
        super().__init__(
            _network(hidden_units, activation_fn, dropout),
            as_dense(feature_columns, is_linear=False),
            _class_head(n_classes),
            as_optimizer(optimizer),
            model_dir=model_dir,
            config=config,
            warm_start_from=warm_start_from,
        )


class BaselineRegressor(_CannedEstimator):
    """Predicts the mean label for all features (`tf.estimator.BaselineRegressor`).

    Loss, metrics and predictions are as in `LinearRegressor`.

    Args:
        model_dir: As in `Estimator`.
        label_dimension: How many numbers a label has.
        optimizer: As in `LinearRegressor`, but a named optimizer has the learning rate
            0.3.
        config: As in `Estimator`.

    Raises:
        EstimatorError: If the optimizer is of another kind.
        ValueError: If `label_dimension` is not positive.
    """

    def __init__(
        self,
        model_dir: StrPath | None = None,
        *,
        label_dimension: int = 1,
        optimizer: Any = "Ftrl",
        config: RunConfig | None = None,
    ) -> None:
        super().__init__(
            _Bias,
            (),
            _regression_head(label_dimension),
            as_optimizer(optimizer, _BASELINE_RATE),
            model_dir=model_dir,
            config=config,
            warm_start_from=None,
        )


class BaselineClassifier(_CannedEstimator):
    """Predicts the share of each class (`tf.estimator.BaselineClassifier`).

    Loss, metrics and predictions are as in `LinearClassifier`.

    Args:
        model_dir: As in `Estimator`.
        n_classes: As in `LinearClassifier`.
        optimizer: As in `BaselineRegressor`.
        config: As in `Estimator`.

    Raises:
        EstimatorError: If the optimizer is of another kind, or there are fewer than two
            classes.
    """

    def __init__(
        self,
        model_dir: StrPath | None = None,
        *,
        n_classes: int = 2,
        optimizer: Any = "Ftrl",
        config: RunConfig | None = None,
    ) -> None:
        super().__init__(
            _Bias,
            (),
            _class_head(n_classes),
            as_optimizer(optimizer, _BASELINE_RATE),
            model_dir=model_dir,
            config=config,
            warm_start_from=None,
        )


def _linear_optimizer(
    optimizer: Any, columns: tuple[DenseColumn, ...]
) -> optax.GradientTransformation:
    if optimizer is None:
        return ftrl(min(_LINEAR_RATE, 1 / math.sqrt(len(columns))))
    return as_optimizer(optimizer, _LINEAR_RATE)


def _network(
    hidden_units: Any, activation_fn: Any, dropout: Any
) -> Callable[..., _Network]:
    check_callable("activation_fn", activation_fn)
    sizes = tuple(hidden_units) if isinstance(hidden_units, list | tuple) else ()
    if not sizes or not all(map(is_positive_int, sizes)):
        raise EstimatorError(
            f"`hidden_units` is {hidden_units!r}, but it must be a list of positive "
            "integers, one for each hidden layer. Write `hidden_units=[64, 32]`."
        )
    is_number = isinstance(dropout, int | float) and not isinstance(dropout, bool)
    is_share = is_number and 0 <= dropout < 1
    if dropout is not None and not is_share:
        raise EstimatorError(
            f"`dropout` is {dropout!r}, but it must be a share from 0 to below 1. "
            "Write `dropout=0.1`."
        )
    return functools.partial(
        _Network, hidden_units=sizes, activation_fn=activation_fn, dropout=dropout
    )
