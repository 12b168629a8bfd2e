"""The gradient of max-pooling equals that of JAX."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

from armillary.xla._max_pool import scatter_to_winners
from tests.xla.arrays import assert_close, make


def scatter_pair(
    images: jax.Array, select: Any, window: Any, strides: Any, padding: Any
) -> tuple[jax.Array, jax.Array]:
    """Returns JAX's gradient of max-pooling and the one of this package."""
    shape = [
        (size + low + high - length) // stride + 1
        for size, (low, high), length, stride in zip(
            images.shape, padding, window, strides, strict=True
        )
    ]
    parameters = dict(
        select_prim=select,
        window_dimensions=window,
        window_strides=strides,
        padding=padding,
    )
    return jax.jit(
        lambda source, operand: (
            lax.select_and_scatter_add_p.bind(source, operand, **parameters),
            scatter_to_winners(source, operand, **parameters),
        )
    )(make(tuple(shape), images.dtype, seed=1), images)


@pytest.mark.slow
@given(st.data())
@settings(max_examples=15, deadline=None)
def test_pool_gradient_equals_jax(data):
    ndim = data.draw(st.integers(1, 3))

    def each(low: int, high: int) -> tuple[int, ...]:
        return tuple(data.draw(st.integers(low, high)) for _ in range(ndim))

    window, strides = each(1, 3), each(1, 4)
    padding = tuple(
        (data.draw(st.integers(0, n - 1)), data.draw(st.integers(0, n - 1)))
        for n in window
    )
    images = jnp.round(make(each(3, 7)))  # Whole numbers, so that there are ties.
    select = data.draw(st.sampled_from((lax.ge_p, lax.le_p)))
    assert_close(*scatter_pair(images, select, window, strides, padding)[::-1])


def test_pool_gradient_is_equal_bit_for_bit_where_windows_do_not_overlap():
    images = jnp.round(make((3, 7, 6, 5)))
    window = (1, 2, 2, 1)
    padding = ((0, 0), (0, 1), (0, 0), (0, 0))
    expected, actual = scatter_pair(images, lax.ge_p, window, window, padding)
    np.testing.assert_array_equal(actual, expected)


def test_pool_gradient_treats_values_that_are_no_numbers_as_jax_does():
    images = make((1, 6, 6, 2)).at[0, 0, 1, 0].set(jnp.nan).at[0, 3, 3, 1].set(jnp.inf)
    images = images.at[0, 4:, 4:, 0].set(-jnp.inf)
    window = (1, 2, 2, 1)
    expected, actual = scatter_pair(images, lax.ge_p, window, window, ((0, 0),) * 4)
    np.testing.assert_array_equal(actual, expected)
