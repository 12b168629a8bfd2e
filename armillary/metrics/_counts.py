"""What metrics are made of: integers of 63 bits, sums of floats, and masks.

JAX has integers of 32 bits only, unless told otherwise, and floats of 32 bits stop
counting at 16,777,216. An epoch of images has more pixels than either can count. So an
integer is held in three parts, of 16 bits each but the last. Parts are sums, so the
copies of replicas add up part by part, whatever was carried from one to the next.
"""

from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.core import Tracer

_BITS = 16
_LOW = (1 << _BITS) - 1


class Counts(nnx.metrics.MetricState):
    """An array of integers from 0 to 2**63 - 1, all counting up from 0."""

    @classmethod
    def zeros(cls, *shape: int) -> Self:
        """Returns counts of a shape."""
        return cls(jnp.zeros((3, *shape), jnp.int32))

    def reset(self) -> None:
        """Begins at 0 again."""
        self[...] = jnp.zeros(self[...].shape, jnp.int32)

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
        """Adds a float of 32 bits."""
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
                value.reset()


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
