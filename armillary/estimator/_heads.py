"""Columns, which read features, and heads, which say what logits mean.

Keys and meanings are those of TensorFlow's heads. Predictions have no `classes`, which
are strings there, and areas under curves are counted by `armillary.metrics.AUC`.
"""

import functools
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from armillary._checks import check_callable, check_positive_int, is_positive_int
from armillary.errors import EstimatorError
from armillary.estimator._model_fn import EstimatorSpec, ModeKeys
from armillary.metrics._labeled import AUC, Precision, Recall


@dataclass(frozen=True)
class NumericColumn:
    """A feature made of numbers; `numeric_column` makes it and documents it."""

    key: str
    shape: tuple[int, ...] = (1,)
    dtype: Any = jnp.float32
    normalizer_fn: Callable[[jax.Array], jax.Array] | None = None

    @property
    def num_inputs(self) -> int:
        """How many numbers an example has."""
        return math.prod(self.shape)

    def read(self, features: Any) -> jax.Array:
        """Returns the numbers of a batch, of shape `(batch, num_inputs)`.

        Raises:
            EstimatorError: If the feature is missing, or of another shape.
        """
        if not isinstance(features, Mapping):
            raise EstimatorError(
                f"The features are of type {type(features).__name__}, but columns "
                "find theirs in a dictionary. Return batches "
                f"`({{{self.key!r}: ...}}, labels)` from `input_fn`."
            )
        if self.key not in features:
            raise EstimatorError(
                f"The features have no {self.key!r}, which `numeric_column"
                f"({self.key!r})` reads; they have {sorted(map(str, features))}. "
                "Return it from `input_fn`, or leave the column out."
            )
        values = jnp.asarray(features[self.key])
        shape = values.shape[1:]
        if shape != self.shape and (shape, self.shape) != ((), (1,)):
            raise EstimatorError(
                f"The feature {self.key!r} has the shape {shape} for each example, "
                f"but its column has {self.shape}. Write `numeric_column({self.key!r}, "
                f"shape={shape})`."
            )
        values = values.astype(self.dtype).reshape(values.shape[0], *self.shape)
        if self.normalizer_fn is not None:
            values = self.normalizer_fn(values)
        return values.reshape(values.shape[0], self.num_inputs)


def numeric_column(
    key: str,
    shape: int | Iterable[int] = (1,),
    *,
    dtype: Any = jnp.float32,
    normalizer_fn: Callable[[jax.Array], jax.Array] | None = None,
) -> NumericColumn:
    """Returns a column of numbers (`tf.feature_column.numeric_column`).

    Args:
        key: The name of the feature.
        shape: The shape that an example has of it. A single number per example may
            come with or without an axis.
        dtype: What the numbers are converted to.
        normalizer_fn: Applied to the numbers of a batch, shape `(batch, *shape)`, such
            as to scale them. It must not change the shape.

    Raises:
        ValueError: If `key` is no string, or `shape` is not made of positive integers.
        TypeError: If `normalizer_fn` cannot be called.
    """
    sizes: Any = tuple(shape) if isinstance(shape, list | tuple) else (shape,)
    is_name = isinstance(key, str) and key.strip()
    if not is_name or not all(map(is_positive_int, sizes)) or not sizes:
        raise ValueError(
            f"`key` is {key!r} and `shape` is {shape!r}, but the key must be a string "
            "that is not empty, and the shape positive integers. Write "
            '`numeric_column("x", shape=(4,))`.'
        )
    if normalizer_fn is not None:
        check_callable("normalizer_fn", normalizer_fn)
    return NumericColumn(key, sizes, dtype, normalizer_fn)


def check_columns(columns: Any) -> tuple[NumericColumn, ...]:
    """Returns columns in the order of their names, as TensorFlow sorts them."""
    found = columns if isinstance(columns, list | tuple) else (columns,)
    if not found or not all(isinstance(column, NumericColumn) for column in found):
        raise EstimatorError(
            f"`feature_columns` is {columns!r:.80}, but it must "
            'be a list of numeric columns. Write `[numeric_column("x")]`; turn other '
            "features into numbers in `input_fn`."
        )
    return tuple(sorted(found, key=lambda column: column.key))


@dataclass(frozen=True)
class Head:
    """What logits of shape `(batch, num_logits)` mean.

    `predict` makes the predictions of them, `evaluate` losses and other metrics of them
    and the labels. Of a label against `label_rule`, the loss is no number.
    """

    num_logits: int
    predict: Callable[[jax.Array], dict[str, jax.Array]]
    evaluate: Callable[[jax.Array, Any], tuple[jax.Array, dict[str, Any]]]
    label_rule: str | None = None

    def make_spec(
        self, mode: ModeKeys, logits: jax.Array, labels: Any, optimizer: Any
    ) -> EstimatorSpec:
        """Returns what a model function of this head returns."""
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


def regression_head(label_dimension: int) -> Head:
    """Returns mean squared error over examples, and over the numbers of a label."""
    check_positive_int("label_dimension", label_dimension)

    def evaluate(logits: jax.Array, labels: Any) -> tuple[jax.Array, dict[str, Any]]:
        labels = _match(labels, label_dimension).astype(jnp.float32)
        metrics = {"label/mean": labels, "prediction/mean": logits}
        return jnp.square(logits - labels), metrics

    return Head(label_dimension, lambda logits: {"predictions": logits}, evaluate)


def class_head(n_classes: Any) -> Head:
    """Returns cross-entropy: of two classes of one logit, that of class 1."""
    if not is_positive_int(n_classes) or n_classes == 1:
        raise EstimatorError(
            f"`n_classes` is {n_classes!r}, but there must be 2 classes or more. Use "
            "`n_classes=2` for labels 0 and 1."
        )
    count = int(n_classes)
    rule = "0 or 1" if count == 2 else f"one of 0 to {count - 1}"
    rule = (
        f"A label that is not {rule} is such a value: `n_classes` is {count}. Pass the "
        "number of classes that there are, `n_classes=`."
    )
    if count == 2:
        return Head(1, _predict_two, _evaluate_two, rule)
    return Head(count, _predict_many, _evaluate_many, rule)


def _predict_two(logits: jax.Array) -> dict[str, jax.Array]:
    pair = jnp.concatenate([jnp.zeros_like(logits), logits], axis=-1)
    return {"logistic": jax.nn.sigmoid(logits), **_predict_many(pair), "logits": logits}


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
    # Any other label ends training, and is refused when the metric is computed.
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
    labels, count = _match(labels, 1), logits.shape[-1]
    if not jnp.issubdtype(labels.dtype, jnp.integer):
        raise EstimatorError(
            f"The labels have the dtype {labels.dtype}, but of {count} classes they "
            "must be integers from 0 on. Convert them in `input_fn`, such as by "
            '`labels.astype("int32")`.'
        )
    labels = labels[:, 0]
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    losses = jnp.where((labels >= 0) & (labels < count), losses, jnp.nan)
    accuracy = (logits.argmax(axis=-1) == labels).astype(jnp.float32)
    return losses, {"accuracy": accuracy}


class _AccuracyBaseline(nnx.metrics.Average):
    """The accuracy of always predicting the more frequent of two classes."""

    def compute(self) -> jax.Array:
        mean = super().compute()
        return jnp.maximum(mean, 1 - mean)


class _AUC(AUC):
    """The area under a curve; if all labels are of one class, what TensorFlow says."""

    def compute(self) -> float:
        area = super().compute()
        if not math.isnan(area):
            return area
        _, positive = self.counts.read()
        return float(self.curve == "PR" and positive.any())


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
        raise EstimatorError(
            f"The labels have the shape {labels.shape}, but it must be (batch, {size})"
            f"{' or (batch,)' if size == 1 else ''}. Reshape them in `input_fn`."
        )
    return labels
