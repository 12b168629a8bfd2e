"""Tests that the arithmetic of a traced step is counted correctly."""

import jax
import jax.numpy as jnp
import pytest

from armillary.plan._costs import count_flops


def count(fn, *arguments):
    return count_flops(jax.make_jaxpr(fn)(*arguments))


def test_products_count_twice_their_multiplications():
    a, b = jnp.ones((3, 4)), jnp.ones((4, 5))
    assert count(jnp.dot, a, b) == {"float32": 2 * 3 * 4 * 5}
    half = count(jnp.dot, a.astype("bfloat16"), b.astype("bfloat16"))
    assert half == {"bfloat16": 120}
    batched = count(jnp.matmul, jnp.ones((7, 3, 4)), jnp.ones((7, 4, 5)))
    assert batched == {"float32": 7 * 120}


@pytest.mark.parametrize("groups", [1, 2])
def test_convolutions_count_as_the_products_that_they_are(groups):
    image, kernel = jnp.ones((2, 8, 8, 6)), jnp.ones((3, 3, 6 // groups, 4))

    def convolve(image, kernel):
        return jax.lax.conv_general_dilated(
            image,
            kernel,
            (1, 1),
            "VALID",
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
            feature_group_count=groups,
        )

    forward = 2 * (2 * 6 * 6 * 4) * 3 * 3 * 6 // groups
    assert count(convolve, image, kernel) == {"float32": forward}


def test_loops_repeat_and_branches_count_as_the_larger_one():
    x = jnp.ones((4, 4))

    def scanned(x):
        return jax.lax.scan(lambda c, _: (c @ c, None), x, None, length=5)[0]

    assert count(scanned, x) == {"float32": 5 * 128}

    def branch(x):
        return jax.lax.cond(x[0, 0] > 0, lambda x: x @ x @ x, lambda x: x @ x, x)

    assert count(branch, x) == {"float32": 2 * 128}
