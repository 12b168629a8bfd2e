"""Metrics of scores and labels: what they take, and what they refuse.

Shapes and types are checked when a step is traced. What a label is shows on the device
only, where nothing can be raised: examples that cannot be judged are counted there, and
`compute` raises.
"""

from typing import Any, Literal

import jax
import jax.numpy as jnp
import jax.scipy.special
import numpy as np
from flax import nnx

from armillary._checks import check_one_of, check_positive_int
from armillary._logging import logger
from armillary.metrics._counts import Counts

_HIGHEST = 20.0  # Probabilities in 32 bits are no nearer to 1 than a logit of 17.
_MOST_TIED = 0.01


class CountingMetric(nnx.metrics.Metric):
    """A metric whose state is `Counts`."""

    def reset(self) -> None:
        """Forgets all examples."""
        for value in vars(self).values():
            if isinstance(value, Counts):
                value.reset()


class LabeledMetric(CountingMetric):
    """A metric of scores and labels, which counts what it refuses."""

    _has_classes = True

    def __init__(self) -> None:
        self.refused = Counts.zeros(2)

    def update(self, *, logits: Any, labels: Any, mask: Any = None, **_: Any) -> None:
        """Counts the examples of a batch.

        Args:
            logits: Scores of shape `(..., num_classes)`; of shape `(...)` for `AUC`,
                and with a `threshold`.
            labels: Numbers of classes, of shape `(...)`.
            mask: Booleans of the shape of `labels`, or of its first axes: which
                examples count. `None` for all.
            **_: What an `nnx.MultiMetric` has for other metrics.

        Raises:
            TypeError: If labels are no integers, or the mask is not boolean.
            ValueError: If shapes do not belong together, or there are too few classes.
        """
        scores, labels = self._as_scores(logits), jnp.asarray(labels)
        name, has_classes = f"{type(self).__name__}.update", self._has_classes
        if not jnp.issubdtype(labels.dtype, jnp.integer) and labels.dtype != bool:
            raise TypeError(
                f"`labels` of `{name}` has the dtype {labels.dtype}, but labels are "
                "numbers of classes. Pass integers: `labels.astype('int32')`, or "
                "`labels.argmax(-1)` of labels that are one-hot."
            )
        if scores.shape[: -1 if has_classes else None] != labels.shape or (
            has_classes and not scores.ndim
        ):
            wanted = "shape of `labels`" + (", and then classes" if has_classes else "")
            raise ValueError(
                f"`logits` of `{name}` has the shape {scores.shape}, and `labels` "
                f"{labels.shape}, but `logits` has the {wanted}. Index or reshape "
                "one of them, such as `logits[..., 1]` for the scores of class 1."
            )
        counted = as_mask(name, mask, labels.shape)
        num_classes = scores.shape[-1] if has_classes else 2
        scores = scores.reshape((-1, num_classes) if has_classes else (-1,))
        labels = labels.reshape(-1)
        if labels.dtype.itemsize <= 4:
            labels = labels.astype(jnp.int32)
        is_class = (labels >= 0) & (labels < num_classes)
        is_score = ~(jnp.isnan(scores).any(-1) if has_classes else jnp.isnan(scores))
        bad = [count(counted & ~is_class), count(counted & ~is_score)]
        self.refused.add(jnp.stack(bad))
        labels = jnp.where(is_class, labels, 0).astype(jnp.int32)
        self._count(scores, labels, counted & is_class & is_score)

    def _as_scores(self, logits: Any) -> jax.Array:
        return jnp.asarray(logits)

    def _count(self, scores: jax.Array, labels: jax.Array, counted: jax.Array) -> None:
        """Counts examples in a row, of which scores may have an axis of classes."""
        raise NotImplementedError

    def _check(self) -> None:
        """Raises if an example had no meaning."""
        num_labels, num_scores = self.refused.read()
        if num_labels or num_scores:
            raise ValueError(
                f"`{type(self).__name__}` has no value: since its reset it got "
                f"{num_labels} labels that are the number of no class, and "
                f"{num_scores} examples with a score that is NaN or no probability. "
                "Leave such examples out, as in `update(..., mask=labels >= 0)`."
            )


def as_mask(name: str, mask: Any, shape: tuple[int, ...]) -> jax.Array:
    """Returns which elements of `shape` count, in a row."""
    if mask is None:
        return jnp.ones(shape, bool).reshape(-1)
    mask = jnp.asarray(mask)
    if mask.dtype != bool:
        raise TypeError(
            f"`mask` of `{name}` has the dtype {mask.dtype}, but an example counts "
            "once or not at all. Pass booleans: `mask > 0`."
        )
    if mask.shape != shape[: mask.ndim]:
        raise ValueError(
            f"`mask` of `{name}` has the shape {mask.shape}, but it must be that of "
            f"what it is for, {shape}, or the beginning of it. Reshape it, such as "
            f"`mask.reshape({shape[:1]})`."
        )
    mask = mask.reshape(*mask.shape, *(1,) * (len(shape) - mask.ndim))
    return jnp.broadcast_to(mask, shape).reshape(-1)


def count(flags: jax.Array) -> jax.Array:
    """Returns how many are true, in 32 bits."""
    return flags.sum(dtype=jnp.int32)


class AUC(LabeledMetric):
    """The area under the ROC curve, or under that of precision and recall.

    Scores are counted in buckets of equal width between logits of -20 and 20, and those
    of one bucket count as equal. So the area under the ROC curve is off by at most half
    the share of pairs, of a positive and a negative example, that fall into one bucket.
    Where that is more than 1 percent, `compute` logs a warning. To be exact, collect
    all scores in `eval_reduce`, and use scikit-learn.

    Args:
        curve: `"ROC"`, or `"PR"` for the average precision, the area below the steps
            of precision over recall.
        from_logits: Whether scores are logits; else they are probabilities.
        num_buckets: How many buckets there are. They take 24 bytes each.

    Raises:
        ValueError: If `curve` is neither, or `num_buckets` is not positive.
    """

    _has_classes = False

    def __init__(
        self,
        curve: Literal["ROC", "PR"] = "ROC",
        *,
        from_logits: bool = True,
        num_buckets: int = 10_000,
    ) -> None:
        check_one_of("curve", curve, ("ROC", "PR"))
        check_one_of("from_logits", from_logits, (True, False))
        super().__init__()
        self.curve, self.from_logits = curve, from_logits
        self.num_buckets = check_positive_int("num_buckets", num_buckets, 2**24)
        self.counts = Counts.zeros(2, self.num_buckets)

    def _as_scores(self, logits: Any) -> jax.Array:
        if self.from_logits:
            return jnp.asarray(logits)
        # NaN outside of 0 to 1, which is refused.
        return jax.scipy.special.logit(jnp.asarray(logits, jnp.float32))

    def _count(self, scores: jax.Array, labels: jax.Array, counted: jax.Array) -> None:
        scaled = (scores.astype(jnp.float32) + _HIGHEST) / (2 * _HIGHEST)
        last = self.num_buckets - 1
        buckets = jnp.clip(scaled * self.num_buckets, 0, last).astype(jnp.int32)
        places = jnp.where(counted, labels * self.num_buckets + buckets, 2 * last + 2)
        counts = jnp.zeros(2 * self.num_buckets + 1, jnp.int32).at[places].add(1)
        self.counts.add(counts[:-1].reshape(2, -1))

    def compute(self) -> float:
        """Returns the area; NaN without a positive or without a negative example.

        Raises what `ConfusionMatrix.compute` does, also for a score that is no
        probability.
        """
        self._check()
        # From the highest score to the lowest.
        negative, positive = self.counts.read()[:, ::-1].astype(np.float64)
        num_pairs = negative.sum() * positive.sum()
        if not num_pairs:
            return float("nan")
        tied = negative @ positive / num_pairs
        if tied > _MOST_TIED:
            logger.warning(
                "AUC: %.1f %% of the pairs of a positive and a negative example have "
                "scores in one bucket, and count as ties, so that the area under the "
                "ROC curve is off by up to %.2g. Use more buckets: "
                "`AUC(num_buckets=%d)`.",
                100 * tied,
                tied / 2,
                10 * self.num_buckets,
            )
        found = np.cumsum(positive)
        if self.curve == "ROC":
            return float(negative @ (found - positive / 2) / num_pairs)
        precision = found / np.maximum(found + np.cumsum(negative), 1)
        return float(positive @ precision / found[-1])


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

    def _count(self, scores: jax.Array, labels: jax.Array, counted: jax.Array) -> None:
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

        Raises what `ConfusionMatrix.compute` does.
        """
        self._check()
        right, total = map(int, self.counts.read())
        return right / total if total else float("nan")
