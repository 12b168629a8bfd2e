"""Arrays and a comparison for all tests of the lowerings."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

IMAGES = ("NHWC", "HWIO", "NHWC")


def make(shape: tuple[int, ...], dtype: Any = jnp.float32, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def assert_close(actual: Any, expected: Any, tolerance: float = 1e-5) -> None:
    actual, expected = (
        np.asarray(value, np.float64).ravel() for value in (actual, expected)
    )
    assert actual.shape == expected.shape
    scale = max(np.abs(expected).max(initial=0.0), 1e-3)
    np.testing.assert_allclose(actual / scale, expected / scale, atol=tolerance)
