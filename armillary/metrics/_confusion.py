"""The confusion matrix, and what follows from it: precision, recall and F1."""

import math
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from armillary._checks import check_one_of, is_positive_int
from armillary.metrics._counts import Counts
from armillary.metrics._labeled import LabeledMetric

_MOST_CLASSES = 2**15


class ConfusionMatrix(LabeledMetric):
    """Counts how often each class was taken for each other.

    Exactly one of the arguments is given.

    Args:
        num_classes: The number of classes, at least 2. The class predicted is the one
            with the highest score.
        threshold: For two classes with one score: class 1 is predicted for a score of
            at least this much, such as 0.0 for logits and 0.5 for probabilities.

    Raises:
        ValueError: If both or none of the arguments are given, or `num_classes` is not
            an integer of at least 2.
        TypeError: If `threshold` is not a number.
    """

    def __init__(
        self, num_classes: int | None = None, *, threshold: float | None = None
    ) -> None:
        if (num_classes is None) == (threshold is None):
            raise ValueError(
                f"`num_classes` is {num_classes!r} and `threshold` is {threshold!r}, "
                "but one of them must be given. Use `num_classes=10` for scores of "
                "classes, or `threshold=0.0` for one logit."
            )
        is_number = type(threshold) in (int, float, np.float64)
        if threshold is not None and not (is_number and math.isfinite(threshold)):
            raise TypeError(
                f"`threshold` is {threshold!r} of type {type(threshold).__name__}, but "
                "it must be a finite number. Use `threshold=0.0`."
            )
        size = 2 if num_classes is None else num_classes
        if not is_positive_int(size) or not 2 <= size <= _MOST_CLASSES:
            raise ValueError(
                f"`num_classes` is {num_classes!r}, but there must be 2 to "
                f"{_MOST_CLASSES:,}. Use `num_classes=2`, or `threshold=0.0` for one "
                "logit."
            )
        super().__init__()
        self.num_classes, self.threshold = size, threshold
        self.counts = Counts.zeros(size, size)

    @property
    def _has_classes(self) -> bool:
        return self.threshold is None

    def _as_scores(self, logits: Any) -> jax.Array:
        if self._has_classes and jnp.shape(logits)[-1:] != (self.num_classes,):
            raise ValueError(
                f"`logits` of `{type(self).__name__}.update` has the shape "
                f"{jnp.shape(logits)}, but its last axis must be the "
                f"{self.num_classes} classes. Pass the scores of all classes, or make "
                "the metric with `threshold=0.0` for one logit."
            )
        return jnp.asarray(logits)

    def _count(self, scores: jax.Array, labels: jax.Array, counted: jax.Array) -> None:
        size, threshold = self.num_classes, self.threshold
        predicted = scores.argmax(-1) if threshold is None else scores >= threshold
        cells = jnp.where(counted, labels * size + predicted.astype(jnp.int32), size**2)
        matrix = jnp.zeros(size**2 + 1, jnp.int32).at[cells].add(1)
        self.counts.add(matrix[:-1].reshape(size, size))

    def compute(self) -> Any:
        """Returns the counts: `[i, j]` examples of class `i` were taken for `j`.

        It is an array of `int64`, exact up to 2**63.

        Raises:
            ValueError: If a label was the number of no class, or a score was NaN.
            TypeError: If called while JAX traces.
        """
        self._check()
        return self.counts.read()


class _Score(ConfusionMatrix):
    """A number between 0 and 1 for each class, or their mean."""

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

    def compute(self) -> Any:
        """Returns the score, in floats of 64 bits; NaN if there was no example.

        It is 0 for a class for which it would be 0 / 0, as in scikit-learn. Raises what
        `ConfusionMatrix.compute` does.
        """
        matrix = super().compute()
        right, predicted, labeled = matrix.diagonal(), matrix.sum(0), matrix.sum(1)
        whole = self._whole(predicted, labeled)
        scores = np.where(matrix.any(), right / np.maximum(whole, 1), np.nan)
        if self.threshold is not None:
            return scores[1]
        if self.average is None:
            return scores
        present = (predicted + labeled > 0).astype(np.int64)
        weights = present if self.average == "macro" else labeled
        return scores @ weights / max(weights.sum(), 1)

    def _whole(self, predicted: np.ndarray, labeled: np.ndarray) -> np.ndarray:
        """Returns what the right predictions are a share of."""
        raise NotImplementedError


class Precision(_Score):
    """The share of the predictions of a class that are right.

    Arguments are as in `F1Score`, and so is what `compute` returns.
    """

    def _whole(self, predicted: np.ndarray, labeled: np.ndarray) -> np.ndarray:
        return predicted


class Recall(_Score):
    """The share of the examples of a class that were found.

    Arguments are as in `F1Score`, and so is what `compute` returns.
    """

    def _whole(self, predicted: np.ndarray, labeled: np.ndarray) -> np.ndarray:
        return labeled


class F1Score(_Score):
    """The harmonic mean of precision and recall, for each class or on average.

    Args:
        num_classes: As in `ConfusionMatrix`.
        threshold: As in `ConfusionMatrix`. The score is then that of class 1.
        average: `"macro"` is the mean over the classes that are among labels or
            predictions, `"weighted"` weighs each by its labels, and `None` gives an
            array of all classes. The other average, `"micro"`, is the accuracy.

    Raises:
        ValueError: As in `ConfusionMatrix`, or if `average` is none of its values.
    """

    def _whole(self, predicted: np.ndarray, labeled: np.ndarray) -> np.ndarray:
        return (predicted + labeled) / 2
