"""Metrics of numbers: how far they are from targets, and where they lie."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from armillary.metrics._counts import CountingMetric, Counts, FloatSum, as_mask
from armillary.summary._kinds import NUM_BUCKETS, Histogram, as_arrays, count_values
from armillary.typing import PyTree


class _MeanError(CountingMetric):
    """The mean of an error over all elements that count."""

    def __init__(self) -> None:
        self.total = FloatSum.zeros(256)
        self.count = Counts.zeros()

    # The error of each element, which is not negative.
    _error: Callable[[jax.Array], jax.Array]

    def update(
        self, *, predictions: Any, targets: Any, mask: Any = None, **_: Any
    ) -> None:
        """Adds the errors of a batch.

        Args:
            predictions: Numbers of any shape.
            targets: Numbers of the same shape.
            mask: Booleans of this shape, or of its first axes: which elements count.
                `None` for all.
            **_: What an `nnx.MultiMetric` has for other metrics.

        Raises:
            TypeError: If the mask is not boolean.
            ValueError: If shapes do not belong together.
        """
        name = f"{type(self).__name__}.update"
        predictions, targets = jnp.asarray(predictions), jnp.asarray(targets)
        if predictions.shape != targets.shape:
            raise ValueError(
                f"`predictions` of `{name}` has the shape {predictions.shape}, and "
                f"`targets` {targets.shape}, but they must be equal. Reshape one of "
                "them, such as `predictions[..., 0]`."
            )
        counted = as_mask(name, mask, targets.shape)
        difference = predictions.astype(jnp.float32) - targets.astype(jnp.float32)
        errors = jnp.where(counted, self._error(difference.reshape(-1)), 0)
        self.total.add_float(errors.sum())
        self.count.add(counted.sum())

    def compute(self) -> float:
        """Returns the mean; NaN without elements, or if one was infinite or NaN.

        Raises:
            TypeError: If called while JAX traces.
        """
        num = int(self.count.read())
        return self.total.read_float() / num if num else float("nan")


class MeanAbsoluteError(_MeanError):
    """The mean distance of predictions from targets."""

    _error = staticmethod(jnp.abs)


class MeanSquaredError(_MeanError):
    """The mean squared distance of predictions from targets."""

    _error = staticmethod(jnp.square)


class Distribution(CountingMetric):
    """How many values lie where, over all steps and replicas since the last reset."""

    def __init__(self) -> None:
        self.counts = Counts.zeros(NUM_BUCKETS)

    def update(self, *, values: PyTree, **_: Any) -> None:
        """Counts the elements of arrays, such as gradients or activations.

        Args:
            values: An array, or a pytree of arrays. In replica context each replica
                counts its own; what is equal on all is counted once by each.
            **_: What an `nnx.MultiMetric` has for other metrics.

        Raises:
            TypeError: If a leaf is no array of numbers.
            ValueError: If the arrays have no elements.
        """
        self.counts.add(count_values(as_arrays("values", values)))

    def compute(self) -> Histogram:
        """Returns the histogram, for an output or a `SummaryManager`.

        Raises:
            TypeError: If called while JAX traces.
        """
        return Histogram.from_counts(self.counts.read())
