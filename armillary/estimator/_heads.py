"""Heads: from logits to predictions, a loss and metrics, with TensorFlow's names."""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax

from armillary._checks import check_positive_int, is_positive_int
from armillary.errors import EstimatorError
from armillary.estimator._model_fn import EstimatorSpec, ModeKeys
from armillary.metrics._labeled import AUC, Precision, Recall
from armillary.metrics._sums import Mean


@dataclass(frozen=True)
class Head:
    """The meaning of logits of shape `(batch, num_logits)`.

    Args:
        num_logits: The number of logits of an example.
        predict: Makes the predictions from logits.
        evaluate: Makes losses and metrics from logits and labels.
        label_rule: The rule for valid labels. The loss of any other label is NaN,
            because an error cannot be raised on a device.
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


def regression_head(label_dimension: Any) -> Head:
    """Returns the head of a regression; the losses are squared errors per number."""
    size = check_positive_int("label_dimension", label_dimension)

    def predict(logits: jax.Array) -> dict[str, jax.Array]:
        return {"predictions": logits}

    def evaluate(logits: jax.Array, labels: Any) -> tuple[jax.Array, dict[str, Any]]:
        labels = _as_labels(labels, size).astype(jnp.float32)
        metrics = {"label/mean": labels, "prediction/mean": logits}
        return jnp.square(logits - labels), metrics

    return Head(size, predict, evaluate)


def class_head(n_classes: Any) -> Head:
    """Returns the head of a classification with the cross-entropy as loss.

    Two classes have one logit, for class 1.
    """
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
    """Returns the losses and the metrics of a classifier of two classes."""
    labels = _as_labels(labels, 1).astype(jnp.float32)
    predictions = _predict_two(logits)
    class_ids = predictions["class_ids"]

    # The metrics count -1 as an invalid label, and then raise an error.
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
    labels = _as_labels(labels, 1)
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


def _as_labels(labels: Any, size: int) -> jax.Array:
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


class _AccuracyBaseline(Mean):
    """The accuracy of always predicting the more frequent of two classes."""

    def compute(self) -> float:
        mean = super().compute()
        return max(mean, 1 - mean)


class _AUC(AUC):
    """The area under a curve, with TensorFlow's number if all labels are equal."""

    def compute(self) -> float:
        area = super().compute()
        if not math.isnan(area):
            return area
        _, positive = self.counts.read()
        return float(self.curve == "PR" and positive.any())
