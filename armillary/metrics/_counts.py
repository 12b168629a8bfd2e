"""What metrics are made of, and metrics of numbers.

JAX has integers of 32 bits only, unless told otherwise, too few for an epoch of pixels.
So an integer is held in three parts, of 16 bits each but the last. Parts are sums, so
the copies of replicas add up part by part, whatever was carried from one to the next.
"""

from collections.abc import Callable
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.core import Tracer

from armillary.summary._kinds import NUM_BUCKETS, Histogram, as_arrays, count_values
from armillary.typing import PyTree

_BITS = 16
_LOW = (1 << _BITS) - 1


class Counts(nnx.metrics.MetricState):
    """An array of integers from 0 to 2**63 - 1, all counting up from 0."""

    @classmethod
    def zeros(cls, *shape: int) -> Self:
        return cls(jnp.zeros((3, *shape), jnp.int32))

    def add(self, numbers: jax.Array) -> None:
        """Adds an array of the same shape, of numbers from 0 to 2**31 - 1."""
        numbers = numbers.astype(jnp.int32)
        # The parts of up to 2**15 replicas have been added up, and fit in 32 bits.
        low, middle, high = self[...]
        low = low + (numbers & _LOW)
        middle = middle + (numbers >> _BITS) + (low >> _BITS)
        self[...] = jnp.stack([low & _LOW, middle & _LOW, high + (middle >> _BITS)])

    def read(self) -> np.ndarray:
        """Returns the counts as `int64`; waits for the device."""
        value = self[...]
        if isinstance(value, Tracer):
            raise TypeError(
                "A metric was computed in a function that JAX traces, such as a step, "
                "in which its counts are not known yet. Call `compute()` in "
                "`train_loop_end` or `eval_end`, which run in Python."
            )
        low, middle, high = np.asarray(value).astype(np.int64)
        return (high << 2 * _BITS) + (middle << _BITS) + low


class FloatSum(Counts):
    """The sum of floats that are not negative, the same in whatever order they come.

    A float of 32 bits is an integer of 24 bits times a power of two, of which there are
    256: the integers of each are added up, in `FloatSum.zeros(256)`.
    """

    def add_float(self, value: jax.Array) -> None:
        bits = jax.lax.bitcast_convert_type(value, jnp.int32) & 0x7FFFFFFF
        power, integer = bits >> 23, bits & 0x7FFFFF
        integer = integer + ((power > 0).astype(jnp.int32) << 23)
        self.add(jnp.where(jnp.arange(256) == power, integer, 0))

    def read_float(self) -> float:
        """Returns the sum, when it is there; NaN if something was not finite."""
        integers = self.read()
        if integers[255]:
            return float("nan")
        powers = np.maximum(np.arange(256), 1) - 150
        return float(np.ldexp(integers.astype(np.float64), powers).sum())


class CountingMetric(nnx.metrics.Metric):
    """A metric whose state is `Counts`."""

    def reset(self) -> None:
        """Forgets all examples."""
        for value in vars(self).values():
            if isinstance(value, Counts):
                value[...] = jnp.zeros(value[...].shape, jnp.int32)


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
            f"what it is for, {shape}, or the beginning of it. Use "
            f"`mask.reshape({shape[:1]})`."
        )
    mask = mask.reshape(*mask.shape, *(1,) * (len(shape) - mask.ndim))
    return jnp.broadcast_to(mask, shape).reshape(-1)


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
        """Returns the mean; NaN without elements, or if one was infinite or NaN."""
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
        """Returns the histogram, for an output or a `SummaryManager`."""
        return Histogram.tree_unflatten(("counts",), (self.counts.read(),))
