"""Metrics of scores and labels, with checks of their arguments.

Shapes and types are checked when a step is traced. The values of labels are known only
on the device, where nothing can be raised. So invalid examples are counted there, and
`compute` raises an error.
"""

import math
from collections.abc import Callable
from typing import Any, Literal, cast

import jax
import jax.numpy as jnp
import jax.scipy.special
import numpy as np

from armillary._checks import check_one_of, check_positive_int, is_positive_int
from armillary._logging import logger
from armillary.metrics._counts import CountingMetric, Counts
from armillary.metrics._numbers import as_mask

_HIGHEST = 20.0  # Probabilities in 32 bits are no nearer to 1 than a logit of 17.
_MAX_TIED = 0.01
_MAX_CLASSES = 2**15


class _LabeledMetric(CountingMetric):
    """A metric of scores and labels, which counts invalid examples."""

    # Counts a flat row of examples; their scores may have an axis of classes.
    _count: Callable[[jax.Array, jax.Array, jax.Array], None]
    _compute: Callable[[np.ndarray], Any]

    def __init__(self, *shape: int, sizes: range | None = None) -> None:
        self.counts = Counts.zeros(*shape)
        self.refused = Counts.zeros(2)
        # The possible numbers of classes; `None` for one score per example.
        self._sizes = sizes

    def update(self, *, logits: Any, labels: Any, mask: Any = None, **_: Any) -> None:
        """Counts the examples of a batch.

        Args:
            logits: Scores of shape `(..., num_classes)`; of shape `(...)` for `AUC`,
                and with a `threshold`.
            labels: Numbers of classes, of shape `(...)`.
            mask: Booleans of the shape of `labels`, or of its first axes: True for the
                examples that count. `None` for all.
            **_: Arguments that an `nnx.MultiMetric` passes to other metrics.

        Raises:
            TypeError: If labels are not integers, or the mask is not boolean.
            ValueError: If the shapes do not fit.
        """
        name = f"{type(self).__name__}.update"
        scores = self._as_scores(logits)
        labels = jnp.asarray(labels)
        self._check(name, scores, labels)
        counted = as_mask(name, mask, labels.shape)

        axes = scores.shape[labels.ndim :]
        num_classes = axes[0] if axes else 2
        scores = scores.reshape(-1, *axes)
        labels = labels.reshape(-1)
        if labels.dtype.itemsize <= 4:
            # The number of classes may be too large for a short type.
            labels = labels.astype(jnp.int32)
        is_class = (labels >= 0) & (labels < num_classes)

        is_nan = jnp.isnan(scores)
        if axes:
            is_nan = is_nan.any(-1)
        is_score = ~is_nan

        refused_labels = counted & ~is_class
        refused_scores = counted & ~is_score
        refused = jnp.stack([refused_labels, refused_scores])
        self.refused.add(refused.sum(1))

        # `_count` uses labels as indices, so it gets 0 in place of a refused label.
        labels = jnp.where(is_class, labels, 0).astype(jnp.int32)
        self._count(scores, labels, counted & is_class & is_score)

    def _check(self, name: str, scores: jax.Array, labels: jax.Array) -> None:
        """Raises an error if labels are not classes, or the shapes do not fit."""
        is_whole = jnp.issubdtype(labels.dtype, jnp.integer)
        if not is_whole and labels.dtype != bool:
            raise TypeError(
                f"`labels` of `{name}` has the dtype {labels.dtype}, but labels are "
                "numbers of classes. Use `labels.astype('int32')`, or "
                "`labels.argmax(-1)` of labels that are one-hot."
            )

        sizes = self._sizes
        axes = scores.shape[labels.ndim :]
        has_examples = scores.shape[: labels.ndim] == labels.shape
        has_classes = not axes
        if sizes is not None:
            has_classes = len(axes) == 1 and axes[0] in sizes
        if has_examples and has_classes:
            return

        rule = "the shape of `labels`"
        if sizes is not None:
            more = " or more" if len(sizes) > 1 else ""
            rule += f", and then {sizes.start}{more} classes"
        raise ValueError(
            f"`logits` of `{name}` has the shape {scores.shape}, and `labels` "
            f"{labels.shape}, but `logits` must have {rule}. Index or reshape one "
            "of them, such as `logits[..., 1]` for the scores of class 1."
        )

    def _as_scores(self, logits: Any) -> jax.Array:
        return jnp.asarray(logits)

    def compute(self) -> Any:
        """Returns the value; waits for the device.

        Raises:
            ValueError: If a label was not the number of a class, or a score was NaN,
                or was not a probability where it must be one.
            TypeError: If called while JAX traces.
        """
        num_labels, num_scores = self.refused.read()
        if num_labels or num_scores:
            raise ValueError(
                f"`{type(self).__name__}` has no value: since its reset it got "
                f"{num_labels} labels that are not the number of a class, and "
                f"{num_scores} examples whose score is NaN or not a probability. "
                "Leave such examples out, as in `update(..., mask=labels >= 0)`."
            )
        return self._compute(self.counts.read())


class AUC(_LabeledMetric):
    """The area under the ROC curve, or under the curve of precision and recall.

    It is NaN without a positive or without a negative example. Scores are counted in
    buckets of equal width between logits of -20 and 20, and scores in one bucket count
    as equal. Pairs of a positive and a negative example in one bucket cause an error:
    the area under the ROC curve is off by at most half the share of these pairs. If the
    share is above 1 percent, `compute` logs a warning. For exact results, collect all
    scores in `eval_reduce`, and use scikit-learn.

    Args:
        curve: `"ROC"`, or `"PR"` for the average precision, the area below the steps
            of precision over recall.
        from_logits: True if scores are logits; else they are probabilities.
        num_buckets: The number of buckets. Each takes 24 bytes.

    Raises:
        ValueError: If `curve` is neither, or `num_buckets` is not positive.
    """

    def __init__(
        self,
        curve: Literal["ROC", "PR"] = "ROC",
        *,
        from_logits: bool = True,
        num_buckets: int = 10_000,
    ) -> None:
        check_one_of("curve", curve, ("ROC", "PR"))
        check_one_of("from_logits", from_logits, (True, False))
        num_buckets = check_positive_int("num_buckets", num_buckets, 2**24)
        super().__init__(2, num_buckets)
        self.curve = curve
        self.from_logits = from_logits
        self.num_buckets = num_buckets

    def _as_scores(self, logits: Any) -> jax.Array:
        if self.from_logits:
            return jnp.asarray(logits)
        # Scores outside of 0 to 1 become NaN, which counts as invalid.
        return jax.scipy.special.logit(jnp.asarray(logits, jnp.float32))

    def _count(self, scores: jax.Array, labels: jax.Array, counted: jax.Array) -> None:
        num_buckets = self.num_buckets
        scaled = (scores.astype(jnp.float32) + _HIGHEST) / (2 * _HIGHEST)
        # The buckets at both ends also take the scores outside of the range.
        buckets = jnp.clip(scaled * num_buckets, 0, num_buckets - 1)
        buckets = buckets.astype(jnp.int32)
        # One row of buckets for each label, and a last place for the other examples.
        nowhere = 2 * num_buckets
        places = jnp.where(counted, labels * num_buckets + buckets, nowhere)
        zeros = jnp.zeros(nowhere + 1, jnp.int32)
        counts = zeros.at[places].add(1)
        self.counts.add(counts[:nowhere].reshape(2, -1))

    def _compute(self, counts: np.ndarray) -> float:
        # The order is from the highest score to the lowest.
        negative, positive = counts[:, ::-1].astype(np.float64)
        num_pairs = negative.sum() * positive.sum()
        if not num_pairs:
            return float("nan")

        tied = negative @ positive / num_pairs
        if tied > _MAX_TIED:
            logger.warning(
                f"AUC: {100 * tied:.1f} % of the pairs of a positive and a negative "
                "example have scores in one bucket, so the area under the ROC "
                f"curve is off by up to {tied / 2:.2g}. Use "
                f"`AUC(num_buckets={10 * self.num_buckets})`."
            )

        # The positive examples from the highest score down to each bucket.
        found = np.cumsum(positive)
        if self.curve == "ROC":
            # Half of the pairs in one bucket count as right.
            found_before = found - positive / 2
            return float(negative @ found_before / num_pairs)
        num_predicted = found + np.cumsum(negative)
        # Without a prediction, 0 / 1 takes the place of 0 / 0.
        precision = found / np.maximum(num_predicted, 1)
        return float(positive @ precision / found[-1])


class TopKAccuracy(_LabeledMetric):
    """The share of examples whose label is among the `k` highest scores.

    If scores are equal, the lower class comes first, as for `argmax`. So `k=1` is the
    accuracy, and a model that gives all classes the same score always predicts class 0.
    The share is NaN if there was no example.

    Args:
        k: The number of highest scores that count.

    Raises:
        ValueError: If `k` is not a positive integer.
    """

    def __init__(self, k: int) -> None:
        self.k = check_positive_int("k", k)
        super().__init__(2, sizes=range(k, 2**31))

    def _count(self, scores: jax.Array, labels: jax.Array, counted: jax.Array) -> None:
        label = labels[:, None]
        score_of_label = jnp.take_along_axis(scores, label, axis=1)
        classes = jnp.arange(scores.shape[1])[None]
        is_before = (scores == score_of_label) & (classes < label)
        is_higher = (scores > score_of_label) | is_before
        is_right = is_higher.sum(1) < self.k
        added = jnp.stack([is_right & counted, counted])
        self.counts.add(added.sum(1))

    def _compute(self, counts: np.ndarray) -> float:
        right, total = map(int, counts)
        return right / total if total else float("nan")


class ConfusionMatrix(_LabeledMetric):
    """Counts the examples of each class by the class that was predicted for them.

    `compute` returns an array of `int64`. Its element `[i, j]` is the number of
    examples of class `i` for which class `j` was predicted. Give exactly one argument.

    Args:
        num_classes: The number of classes, at least 2. The predicted class is the one
            with the highest score.
        threshold: For two classes with one score: class 1 is predicted for a score of
            at least this much, such as 0.0 for logits and 0.5 for probabilities.

    Raises:
        ValueError: If both or none of the arguments are given, `num_classes` is not an
            integer of at least 2, or `threshold` is not a finite number.
    """

    def __init__(
        self, num_classes: int | None = None, *, threshold: float | None = None
    ) -> None:
        size = 2 if num_classes is None else num_classes
        is_size = is_positive_int(size) and 2 <= size <= _MAX_CLASSES
        is_number = threshold is None or _is_finite(threshold)
        is_one_given = (num_classes is None) != (threshold is None)
        is_valid = is_size and is_number
        if not (is_one_given and is_valid):
            raise ValueError(
                f"`num_classes` is {num_classes!r} and `threshold` is {threshold!r}, "
                f"but one of them must be given, 2 to {_MAX_CLASSES:,} classes or a "
                "finite number. Use `num_classes=10` for scores of classes, or "
                "`threshold=0.0` for one logit."
            )
        sizes = range(size, size + 1) if threshold is None else None
        super().__init__(size, size, sizes=sizes)
        self.num_classes = size
        self.threshold = threshold

    def _count(self, scores: jax.Array, labels: jax.Array, counted: jax.Array) -> None:
        size = self.num_classes
        if self.threshold is None:
            predicted = scores.argmax(-1)
        else:
            predicted = scores >= self.threshold
        # The cell after the last one takes the examples that do not count.
        num_cells = size**2
        cells = labels * size + predicted.astype(jnp.int32)
        cells = jnp.where(counted, cells, num_cells)
        zeros = jnp.zeros(num_cells + 1, jnp.int32)
        matrix = zeros.at[cells].add(1)
        self.counts.add(matrix[:num_cells].reshape(size, size))

    def _compute(self, counts: np.ndarray) -> Any:
        return counts


def _is_finite(threshold: object) -> bool:
    is_number = type(threshold) in (int, float, np.float64)
    return is_number and math.isfinite(cast(float, threshold))


class _Score(ConfusionMatrix):
    """A number between 0 and 1 for each class, or their mean."""

    # The divisor of the number of right predictions: 1.0 for the number of predictions,
    # 0.0 for the number of labels, 0.5 for the mean of both.
    _share_of_predictions = 0.5

    def __init__(
        self,
        num_classes: int | None = None,
        *,
        threshold: float | None = None,
        average: Literal["macro", "weighted"] | None = "macro",
    ) -> None:
        check_one_of("average", average, ("macro", "weighted", None))
        super().__init__(num_classes, threshold=threshold)
        self.average = average

    def _compute(self, counts: np.ndarray) -> Any:
        # Rows are labels, and columns are predictions.
        right = counts.diagonal()
        predicted = counts.sum(0)
        labeled = counts.sum(1)
        share = self._share_of_predictions
        whole = share * predicted + (1 - share) * labeled
        # If the divisor is below 1, no prediction is right, and the score is 0.
        scores = right / np.maximum(whole, 1)
        scores = np.where(counts.any(), scores, np.nan)
        if self.threshold is not None:
            return scores[1]
        if self.average is None:
            return scores

        if self.average == "macro":
            is_present = predicted + labeled > 0
            weights = is_present.astype(np.int64)
        else:
            weights = labeled
        # Without examples, the scores are NaN already.
        return scores @ weights / max(weights.sum(), 1)


class Precision(_Score):
    """The share of the predictions of a class that are right; made as `F1Score` is."""

    _share_of_predictions = 1.0


class Recall(_Score):
    """The share of the examples of a class that were found; made as `F1Score` is."""

    _share_of_predictions = 0.0


class F1Score(_Score):
    """The harmonic mean of precision and recall, for each class or on average.

    As in scikit-learn, the score of a class is 0 if it would be 0 / 0. It is NaN if
    there was no example.

    Args:
        num_classes: As in `ConfusionMatrix`.
        threshold: As in `ConfusionMatrix`. The score then belongs to class 1.
        average: `"macro"` is the mean over the classes that are among labels or
            predictions, `"weighted"` weighs each by its labels, and `None` gives an
            array of all classes. The other average, `"micro"`, is the accuracy.

    Raises:
        ValueError: As in `ConfusionMatrix`, or if `average` has another value.
    """
