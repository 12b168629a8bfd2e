"""What metrics of scores and labels share: what they take, and what they refuse.

Shapes and types are checked when a step is traced. What a label is shows on the device
only, where nothing can be raised: examples that cannot be judged are counted there, and
`compute` raises.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from armillary.metrics._counts import Counts


class Examples(NamedTuple):
    """Examples in a row.

    Attributes:
        scores: Of shape `(examples, classes)`, or `(examples,)` if there is one each.
        labels: Of shape `(examples,)` and type `int32`.
        counted: Which examples count.
    """

    scores: jax.Array
    labels: jax.Array
    counted: jax.Array


class CountingMetric(nnx.metrics.Metric):
    """A metric whose state is `Counts`."""

    def reset(self) -> None:
        """Forgets all examples."""
        for value in vars(self).values():
            if isinstance(value, Counts):
                value.reset()


class LabeledMetric(CountingMetric):
    """A metric of scores and labels, which counts what it refuses."""

    def __init__(self) -> None:
        self.refused = Counts.zeros(2)

    def _take(
        self, logits: Any, labels: Any, mask: Any, *, has_classes: bool
    ) -> Examples:
        """Returns the examples in a row; those without a meaning do not count."""
        scores, labels = jnp.asarray(logits), jnp.asarray(labels)
        name = f"{type(self).__name__}.update"
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
        bad = [counted & ~is_class, counted & ~is_score]
        self.refused.add(jnp.stack([count(bad[0]), count(bad[1])]))
        labels = jnp.where(is_class, labels, 0).astype(jnp.int32)
        return Examples(scores, labels, counted & is_class & is_score)

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
