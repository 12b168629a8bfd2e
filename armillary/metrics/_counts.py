"""Exact sums, from which metrics are made.

By default, JAX has only integers of 32 bits, too few for an epoch of pixels. So an
integer is held in three parts; all parts except the last have 16 bits. Parts are sums,
so the copies of replicas can be added part by part, even after carries between parts.
"""

import functools
import math
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.core import Tracer

from armillary.state._slots import Trait, with_trait

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
    rest = numbers >> _BITS  # Negative if the number is.
    middle = rest & _LOW
    high = rest >> _BITS
    return jnp.stack([low, middle, high])


@jax.jit
def add_parts(total: jax.Array, added: jax.Array) -> jax.Array:
    """Returns the sum of two arrays of parts, with at most 16 bits in the low ones."""
    # The parts of up to 2**15 replicas have been added up, and fit in 32 bits.
    low, middle, high = total + added
    middle += low >> _BITS
    high += middle >> _BITS
    return jnp.stack([low & _LOW, middle & _LOW, high])


def join_parts(parts: np.ndarray) -> np.ndarray:
    """Returns the integers that three parts represent, as `int64`."""
    low, middle, high = parts.astype(np.int64)
    return (high << 2 * _BITS) + (middle << _BITS) + low


def split_integers(integers: np.ndarray) -> np.ndarray:
    """Returns the three parts that represent integers of 64 bits."""
    low = integers & _LOW
    middle = (integers >> _BITS) & _LOW
    high = integers >> 2 * _BITS
    return np.stack([low, middle, high]).astype(np.int32)


# The layout of a float of 32 bits. Its value is an integer times two to the power of
# its stored power minus `_BIAS`.
_MANTISSA_BITS = 23
_MANTISSA = (1 << _MANTISSA_BITS) - 1
_BIAS = 127 + _MANTISSA_BITS
_MAX_POWER = 254
_NOT_FINITE = 255
# The number of powers of two that share an integer (as a logarithm to the base 2), by
# the number of integers.
_SHIFTS = {256: 0, 65: 2}
NUM_INTEGERS = 65
# Marks in the last integer, so that infinities of both signs and NaN are told apart.
_INFINITY = 1
_MINUS_BITS = 30
_MINUS_INFINITY = 1 << _MINUS_BITS
_NAN = _INFINITY + _MINUS_INFINITY


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
    value = jax.lax.stop_gradient(value).astype(jnp.float32)
    bits = jax.lax.bitcast_convert_type(value, jnp.int32)
    is_negative = bits < 0
    stored_power = (bits >> _MANTISSA_BITS) & 0xFF
    # The leading 1 is not stored, and the smallest numbers have none.
    has_leading = stored_power > 0
    leading = has_leading.astype(jnp.int32) << _MANTISSA_BITS
    mantissa = (bits & _MANTISSA) + leading

    mark = jnp.where(is_negative, _MINUS_INFINITY, _INFINITY)
    mark = jnp.where(jnp.isnan(value), _NAN, mark)

    shift = _SHIFTS[num_integers]
    factors = np.asarray(times, np.int64)
    shape = (*value.shape, num_integers)
    places = jax.lax.broadcasted_iota(jnp.int32, shape, value.ndim)
    total = jnp.zeros((3, *shape), jnp.int32)
    # A float has 24 bits. 32 bits leave room for three bits of a power and four of a
    # factor, and for the sign.
    for position in range(0, 32, 4):
        digit = (factors >> position) & 0xF
        digit = digit.astype(np.int32)
        if not digit.any():
            continue

        # Numbers without a leading 1 are as far apart as numbers with the power 1.
        power = jnp.maximum(stored_power, 1) + position
        is_finite = (stored_power < _NOT_FINITE) & (power <= _MAX_POWER)
        power_in_integer = power & ((1 << shift) - 1)
        integer = (mantissa * digit) << power_in_integer
        integer = jnp.where(is_negative, -integer, integer)
        # A factor of 0 leaves a value out, even if it is infinite or NaN.
        mark_if_used = jnp.where(digit > 0, mark, 0)

        place = jnp.where(is_finite, power >> shift, num_integers - 1)
        added = jnp.where(is_finite, integer, mark_if_used)
        is_here = places == place[..., None]
        spread = jnp.where(is_here, added[..., None], 0)
        parts = split_in_parts(spread)
        total = add_parts(total, parts)
    return total


def sum_integers(integers: np.ndarray) -> np.ndarray:
    """Returns the sums that the integers of a `FloatSum` represent, in 64 bits."""
    num_integers = integers.shape[-1]
    num_powers = num_integers - 1
    powers = np.arange(num_powers) << _SHIFTS[num_integers]
    finite = integers[..., :-1].astype(np.float64)
    terms = np.ldexp(finite, powers - _BIAS)
    rows = terms.reshape(-1, num_powers)
    # `fsum` rounds once, at the end.
    sums = np.array([math.fsum(row) for row in rows])
    sums = sums.reshape(terms.shape[:-1])

    marks = integers[..., -1]
    has_plus = (marks & (_MINUS_INFINITY - 1)) > 0
    has_minus = (marks >> _MINUS_BITS) > 0
    sums = np.where(has_plus, np.inf, sums)
    sums_with_minus = np.where(has_plus, np.nan, -np.inf)
    return np.where(has_minus, sums_with_minus, sums)


class CountingMetric(nnx.metrics.Metric):
    """A metric whose state is `Counts`."""

    def reset(self) -> None:
        """Forgets all examples."""
        for value in vars(self).values():
            if isinstance(value, Counts):
                value[...] = jnp.zeros(value[...].shape, jnp.int32)
