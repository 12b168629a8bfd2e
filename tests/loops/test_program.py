"""Tests of the choice between a loop on the device and one in Python."""

import jax
import jax.numpy as jnp
import pytest

from armillary.loops._program import has_slow_loop


def convolve(x):
    return jax.lax.conv(x, jnp.ones((1, 1, 3, 3)), (1, 1), "SAME")


def convolve_in_order(x):
    axes = ("NHWC", "HWIO", "NHWC")
    window = jnp.ones((3, 3, x.shape[-1], 1))
    return jax.lax.conv_general_dilated(x, window, (1, 1), "SAME", None, None, axes)


@pytest.mark.parametrize(
    ("fn", "platform", "expected"),
    [
        (convolve, "cpu", True),
        (convolve, "gpu", False),
        (jax.jit(convolve), "cpu", True),
        (lambda x: jax.lax.fori_loop(0, 2, lambda _, y: convolve(y), x), "cpu", True),
        (lambda x: jnp.tanh(x) @ x[0, 0], "cpu", False),
        (convolve_in_order, "cpu", False),
        (jax.grad(lambda x: jnp.tanh(convolve_in_order(x)).sum()), "cpu", True),
    ],
    ids=["plain", "gpu", "nested", "loop", "without", "in order", "gradient"],
)
def test_convolutions_on_a_cpu_are_slow_in_loops(fn, platform, expected):
    program = jax.make_jaxpr(fn)(jnp.ones((1, 1, 4, 4)))

    assert has_slow_loop(program, platform) is expected
