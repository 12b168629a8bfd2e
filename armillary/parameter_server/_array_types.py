"""Arrays on their way between processes: NumPy's, and random keys as their words."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np


class ArrayType(NamedTuple):
    """Shape and dtype of an array.

    Attributes:
        shape: The shape, without the words of random keys.
        dtype: The dtype; of random keys, that of their words.
        impl: Name of the random generator, of random keys.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    impl: str | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes of the array."""
        return int(np.prod(self.shape)) * self.dtype.itemsize

    def zeros(self) -> jax.Array:
        """Returns an array of the type."""
        if self.impl is None:
            return jnp.zeros(self.shape, self.dtype)
        word = jax.random.key_data(jax.random.key(0, impl=self.impl))
        words = jnp.zeros((*self.shape, *word.shape), self.dtype)
        return jax.random.wrap_key_data(words, impl=self.impl)

    def from_host(self, array: Any) -> jax.Array:
        """Returns what `to_host` was given."""
        if self.impl is None:
            return jnp.asarray(array)
        return jax.random.wrap_key_data(jnp.asarray(array), impl=self.impl)


def type_of(array: jax.Array) -> ArrayType:
    """Returns the type of an array."""
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        dtype = jax.random.key_data(array).dtype
        return ArrayType(array.shape, np.dtype(dtype), str(jax.random.key_impl(array)))
    return ArrayType(array.shape, np.dtype(array.dtype))


def to_host(array: jax.Array) -> np.ndarray:
    """Returns an array that can be sent."""
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        array = jax.random.key_data(array)
    return np.asarray(array)
