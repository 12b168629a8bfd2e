"""How often the label is among the classes with the highest scores."""

from typing import Any

import jax.numpy as jnp

from armillary._checks import check_positive_int
from armillary.metrics._counts import Counts
from armillary.metrics._labeled import LabeledMetric, count


class TopKAccuracy(LabeledMetric):
    """The share of examples whose label is among the `k` highest scores.

    Of equal scores the one of the lower class is higher, as for `argmax`: so `k=1` is
    the accuracy, and a model that gives all classes the same score is not right.

    Args:
        k: How many of the highest scores.

    Raises:
        ValueError: If `k` is not a positive integer.
    """

    def __init__(self, k: int) -> None:
        super().__init__()
        self.k = check_positive_int("k", k)
        self.counts = Counts.zeros(2)

    def update(self, *, logits: Any, labels: Any, mask: Any = None, **_: Any) -> None:
        """Counts the examples of a batch.

        Args:
            logits: Scores of shape `(..., num_classes)`, with `num_classes >= k`.
            labels: Numbers of classes, of shape `(...)`.
            mask: As in `ConfusionMatrix.update`.
            **_: What an `nnx.MultiMetric` has for other metrics.

        Raises:
            TypeError: If labels are no integers, or the mask is not boolean.
            ValueError: If there are fewer than `k` classes, or shapes do not belong
                together.
        """
        scores, labels, counted = self._take(logits, labels, mask, has_classes=True)
        if scores.shape[1] < self.k:
            raise ValueError(
                f"`logits` of `TopKAccuracy.update` has {scores.shape[1]} classes, but "
                f"`k` is {self.k}, so every label would be among them. Use "
                "`TopKAccuracy(k=1)` or another number below that of classes."
            )
        own = jnp.take_along_axis(scores, labels[:, None], axis=1)
        is_before = jnp.arange(scores.shape[1])[None] < labels[:, None]
        is_higher = (scores > own) | ((scores == own) & is_before)
        is_right = is_higher.sum(1) < self.k
        self.counts.add(jnp.stack([count(is_right & counted), count(counted)]))

    def compute(self) -> float:
        """Returns the share; NaN if there was no example.

        Raises:
            ValueError: If a label was the number of no class, or a score was NaN.
            TypeError: If called while JAX traces.
        """
        self._check()
        right, total = map(int, self.counts.read())
        return right / total if total else float("nan")
