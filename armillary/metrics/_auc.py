"""The area under a curve of binary scores."""

from typing import Any, Literal

import jax.numpy as jnp
import jax.scipy.special
import numpy as np

from armillary._checks import check_one_of, check_positive_int
from armillary._logging import logger
from armillary.metrics._counts import Counts
from armillary.metrics._labeled import LabeledMetric

_HIGHEST = 20.0  # Probabilities in 32 bits are no nearer to 1 than a logit of 17.
_MOST_TIED = 0.01


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

    def update(self, *, logits: Any, labels: Any, mask: Any = None, **_: Any) -> None:
        """Counts the examples of a batch.

        Args:
            logits: One score for each example; with `from_logits=False`, from 0 to 1.
            labels: 0 or 1, of the same shape.
            mask: As in `ConfusionMatrix.update`.
            **_: What an `nnx.MultiMetric` has for other metrics.

        Raises:
            TypeError: If labels are no integers, or the mask is not boolean.
            ValueError: If shapes do not belong together.
        """
        if not self.from_logits:
            # NaN outside of 0 to 1, which is refused.
            logits = jax.scipy.special.logit(jnp.asarray(logits, jnp.float32))
        scores, labels, counted = self._take(logits, labels, mask, has_classes=False)
        scaled = (scores.astype(jnp.float32) + _HIGHEST) / (2 * _HIGHEST)
        last = self.num_buckets - 1
        buckets = jnp.clip(scaled * self.num_buckets, 0, last).astype(jnp.int32)
        places = jnp.where(counted, labels * self.num_buckets + buckets, 2 * last + 2)
        counts = jnp.zeros(2 * self.num_buckets + 1, jnp.int32).at[places].add(1)
        self.counts.add(counts[:-1].reshape(2, -1))

    def compute(self) -> float:
        """Returns the area; NaN without a positive or without a negative example.

        Raises:
            ValueError: If a label was neither 0 nor 1, or a score was NaN or no
                probability.
            TypeError: If called while JAX traces.
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
