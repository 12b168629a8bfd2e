"""Exact sums, from which metrics are made, and metrics of numbers.

By default, JAX has only integers of 32 bits, too few for an epoch of pixels. So an
integer is held in three parts; all parts except the last have 16 bits. Parts are sums,
so the copies of replicas can be added part by part, even after carries between parts.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.core import Tracer

from armillary.state._slots import Trait, with_trait
from armillary.summary._kinds import NUM_BUCKETS, Histogram, as_arrays, count_values
from armillary.typing import PyTree

_BITS = 16
_LOW = (1 << _BITS) - 1


@with_trait(Trait.IN_PARTS)
class Counts(nnx.metrics.MetricState):
    """An array of integers between -2**63 and 2**63, all counting from 0."""

    @classmethod
    def zeros(cls, *shape: int) -> Self:
        return cls(jnp.zeros((3, *shape), jnp.int32))

    def add(self, numbers: jax.Array) -> None:
        """Adds an array of the same shape, of numbers between -2**31 and 2**31."""
        self[...] = add_parts(self[...], split_in_parts(numbers))

    def read(self) -> np.ndarray:
        """Returns the counts as `int64`; waits for the device."""
        value = self[...]
        if isinstance(value, Tracer):
            raise TypeError(
                "A metric was computed in a function that JAX traces, such as a step. "
                "Its counts are not known there. Call `compute()` in "
                "`train_loop_end` or `eval_end`, which run in Python."
            )
        return join_parts(np.asarray(value))


@jax.jit
def split_in_parts(numbers: jax.Array) -> jax.Array:
    """Returns integers of 32 bits as the three parts of `Counts`."""
    numbers = numbers.astype(jnp.int32)
    low = numbers & _LOW
    middle = numbers >> _BITS  # negative if the number is
    return jnp.stack([low, middle & _LOW, middle >> _BITS])


@jax.jit
def add_parts(total: jax.Array, added: jax.Array) -> jax.Array:
    """Returns the sum of two arrays of parts, with at most 16 bits in the low ones."""
    # The parts of up to 2**15 replicas have been added up, and fit in 32 bits.
    low, middle, high = total + added
    middle = middle + (low >> _BITS)
    return jnp.stack([low & _LOW, middle & _LOW, high + (middle >> _BITS)])


def join_parts(parts: np.ndarray) -> np.ndarray:
    """Returns the integers that three parts represent, as `int64`."""
    low, middle, high = parts.astype(np.int64)
    return (high << 2 * _BITS) + (middle << _BITS) + low


def split_integers(integers: np.ndarray) -> np.ndarray:
    """Returns the three parts that represent integers of 64 bits."""
    low = integers & _LOW
    middle = (integers >> _BITS) & _LOW
    return np.stack([low, middle, integers >> 2 * _BITS]).astype(np.int32)


_MANTISSA_BITS = 23
_BIAS = 127 + _MANTISSA_BITS
_MOST_POWER = 254
_NOT_FINITE = 255
# The number of powers of two that share an integer (as a logarithm to the base 2), by
# the number of integers.
_SHIFTS = {256: 0, 65: 2}
NUM_INTEGERS = 65
# Marks in the last integer, so that infinities of both signs and NaN are told apart.
_INFINITY, _MINUS_INFINITY = 1, 1 << 30


@with_trait(Trait.MARKS_NOT_FINITE)
class FloatSum(Counts):
    """Sums of floats, exact and independent of the order of the floats.

    A float of 32 bits is an integer of 24 bits times one of 256 powers of two.
    `FloatSum.zeros(..., 65)` has one sum for four neighboring powers, and
    `FloatSum.zeros(..., 256)` has one sum for each power. The last integer counts
    values that are not finite.
    """

    def add_float(self, value: jax.Array, times: int | tuple[int, ...] = 1) -> None:
        """Adds an array of the shape of the sums.

        Args:
            value: An array of floats.
            times: The factors of the values, integers from 0 to 2**31 - 1: one for all,
                or one for each value in a row.
        """
        parts = float_parts(value, times, self[...].shape[-1])
        self[...] = add_parts(self[...], parts)

    def read_float(self) -> Any:
        """Returns the sums in 64 bits, a single one as a `float`; waits for them."""
        sums = sum_integers(self.read())
        return sums if sums.ndim else float(sums)


@functools.partial(jax.jit, static_argnums=(1, 2))
def float_parts(
    value: jax.Array, times: int | tuple[int, ...], num_integers: int
) -> jax.Array:
    """Returns the parts of the integers that represent floats, times a number."""
    shift = _SHIFTS[num_integers]
    factors = np.asarray(times, np.int64)
    value = jax.lax.stop_gradient(value).astype(jnp.float32)
    bits = jax.lax.bitcast_convert_type(value, jnp.int32)
    stored_power = (bits >> _MANTISSA_BITS) & 0xFF
    is_normal = (stored_power > 0).astype(jnp.int32)
    mantissa = (bits & ((1 << _MANTISSA_BITS) - 1)) + (is_normal << _MANTISSA_BITS)
    mark = jnp.where(bits < 0, _MINUS_INFINITY, _INFINITY)
    mark = jnp.where(jnp.isnan(value), _INFINITY + _MINUS_INFINITY, mark)

    shape = (*value.shape, num_integers)
    places = jax.lax.broadcasted_iota(jnp.int32, shape, value.ndim)
    total = jnp.zeros((3, *shape), jnp.int32)
    # A float has 24 bits. 32 bits leave room for three bits of a power and four of a
    # factor, and for the sign.
    for position in range(0, 32, 4):
        digit = ((factors >> position) & 0xF).astype(np.int32)
        if not digit.any():
            continue
        power = jnp.maximum(stored_power, 1) + position
        is_finite = (stored_power < _NOT_FINITE) & (power <= _MOST_POWER)
        integer = (mantissa * digit) << (power & ((1 << shift) - 1))
        integer = jnp.where(bits < 0, -integer, integer)
        noted = jnp.where(digit > 0, mark, 0)
        place = jnp.where(is_finite, power >> shift, num_integers - 1)
        added = jnp.where(is_finite, integer, noted)
        is_here = places == place[..., None]
        parts = split_in_parts(jnp.where(is_here, added[..., None], 0))
        total = add_parts(total, parts)
    return total


def sum_integers(integers: np.ndarray) -> np.ndarray:
    """Returns the sums that the integers of a `FloatSum` represent, in 64 bits."""
    num_integers = integers.shape[-1]
    powers = np.arange(num_integers - 1) << _SHIFTS[num_integers]
    terms = np.ldexp(integers[..., :-1].astype(np.float64), powers - _BIAS)
    rows = terms.reshape(-1, num_integers - 1)
    sums = np.array([math.fsum(row) for row in rows]).reshape(terms.shape[:-1])

    marks = integers[..., -1]
    has_plus = (marks & (_MINUS_INFINITY - 1)) > 0
    has_minus = (marks >> 30) > 0
    sums = np.where(has_plus, np.inf, sums)
    return np.where(has_minus, np.where(has_plus, np.nan, -np.inf), sums)


class CountingMetric(nnx.metrics.Metric):
    """A metric whose state is `Counts`."""

    def reset(self) -> None:
        """Forgets all examples."""
        for value in vars(self).values():
            if isinstance(value, Counts):
                value[...] = jnp.zeros(value[...].shape, jnp.int32)


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
    mask = mask.reshape(*mask.shape, *(1,) * (len(shape) - mask.ndim))
    return jnp.broadcast_to(mask, shape).reshape(-1)


class _MeanError(CountingMetric):
    """The mean of an error over all elements under the mask."""

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
        errors = jnp.where(counted, self._error(difference.reshape(-1)), 0)
        self.total.add_float(errors.sum())
        self.count.add(counted.sum())

    def compute(self) -> float:
        """Returns the mean; NaN without elements, or if an element was NaN."""
        num = int(self.count.read())
        return self.total.read_float() / num if num else float("nan")


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
        self.counts.add(count_values(as_arrays("values", values)))

    def compute(self) -> Histogram:
        """Returns the histogram, for an output or a `SummaryManager`."""
        return Histogram.tree_unflatten(("counts",), (self.counts.read(),))
