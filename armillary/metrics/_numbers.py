"""Metrics of numbers: mean errors of predictions, and histograms."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from armillary.metrics._counts import CountingMetric, Counts, FloatSum
from armillary.summary._kinds import NUM_BUCKETS, Histogram, as_arrays, count_values
from armillary.typing import PyTree


def as_mask(name: str, mask: Any, shape: tuple[int, ...]) -> jax.Array:
    """Returns a flat array that is True for the elements of `shape` that count."""
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
            f"`mask` of `{name}` has the shape {mask.shape}. It must have the shape of "
            f"the values, {shape}, or the first axes of this shape. Use "
            f"`mask.reshape({shape[:1]})`."
        )

    missing_axes = (1,) * (len(shape) - mask.ndim)
    mask = mask.reshape(*mask.shape, *missing_axes)
    return jnp.broadcast_to(mask, shape).reshape(-1)


class _MeanError(CountingMetric):
    """The mean of an error over all elements under the mask."""

    def __init__(self) -> None:
        self.total = FloatSum.zeros(256)
        self.count = Counts.zeros()

    # The error of each element, which is not negative.
    _error: Callable[[jax.Array], jax.Array]

    def update(
        self,
        *,
        predictions: Any,
        targets: Any,
        mask: Any = None,
        **_: Any,
    ) -> None:
        """Adds the errors of a batch.

        Args:
            predictions: Numbers of any shape.
            targets: Numbers of the same shape.
            mask: Booleans of this shape, or of its first axes: True for the elements
                that count. `None` for all.
            **_: Arguments that an `nnx.MultiMetric` passes to other metrics.

        Raises:
            TypeError: If the mask is not boolean.
            ValueError: If the shapes do not fit.
        """
        name = f"{type(self).__name__}.update"
        predictions = jnp.asarray(predictions)
        targets = jnp.asarray(targets)
        if predictions.shape != targets.shape:
            raise ValueError(
                f"`predictions` of `{name}` has the shape {predictions.shape}, and "
                f"`targets` {targets.shape}, but they must be equal. Reshape one of "
                "them, such as `predictions[..., 0]`."
            )

        counted = as_mask(name, mask, targets.shape)
        difference = predictions.astype(jnp.float32) - targets.astype(jnp.float32)
        errors = self._error(difference.reshape(-1))
        # A product with the mask would keep NaN.
        errors = jnp.where(counted, errors, 0)
        self.total.add_float(errors.sum())
        self.count.add(counted.sum())

    def compute(self) -> float:
        """Returns the mean; NaN without elements, or if an element was NaN."""
        num_elements = int(self.count.read())
        if not num_elements:
            return float("nan")
        return self.total.read_float() / num_elements


class MeanAbsoluteError(_MeanError):
    """The mean distance of predictions from targets."""

    _error = staticmethod(jnp.abs)


class MeanSquaredError(_MeanError):
    """The mean squared distance of predictions from targets."""

    _error = staticmethod(jnp.square)


class Distribution(CountingMetric):
    """A histogram of values, over all steps and replicas since the last reset."""

    def __init__(self) -> None:
        self.counts = Counts.zeros(NUM_BUCKETS)

    def update(self, *, values: PyTree, **_: Any) -> None:
        """Counts the elements of arrays, such as gradients or activations.

        Args:
            values: An array, or a pytree of arrays. In replica context each replica
                counts its own arrays, so an array that is equal on all replicas is
                counted once by each.
            **_: Arguments that an `nnx.MultiMetric` passes to other metrics.

        Raises:
            TypeError: If a leaf is not an array of numbers.
            ValueError: If the arrays have no elements.
        """
        arrays = as_arrays("values", values)
        self.counts.add(count_values(arrays))

    def compute(self) -> Histogram:
        """Returns the histogram, for an output or a `SummaryManager`."""
        counts = self.counts.read()
        # The constructor would count values. Here they are counted already.
        return Histogram.tree_unflatten(("counts",), (counts,))
