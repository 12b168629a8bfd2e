"""The arithmetic of estimates: operations, bytes sent, and the time they take."""

import jax
import jax.numpy as jnp
import pytest

from armillary.plan._costs import (
    Collective,
    Estimate,
    count_flops,
    count_sent_bytes,
    estimate_step,
)
from armillary.plan._targets import parse_topology
from tests.plan.test_topology import MINE


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


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("all-reduce", 1500.0),
        ("all-gather", 750.0),
        ("reduce-scatter", 750.0),
        ("collective-permute", 1000.0),
    ],
)
def test_bytes_that_a_ring_of_four_sends(kind, expected):
    assert count_sent_bytes(Collective(kind, 1000, "step", group_size=4)) == expected


def test_a_step_takes_as_long_as_its_slowest_part():
    sums = [Collective("all-reduce", 10**9, "step", times=2, group_size=4)]
    topology = parse_topology("mine:2x2", MINE)
    estimate = estimate_step(topology, {"float32": 3e12, "int8": 1e12}, 2e11, sums)
    assert estimate == Estimate(compute=4.0, memory=2.0, communication=0.3)
    assert estimate.overlapped == 4.0
    assert estimate.sequential == 4.3


def test_sums_over_several_hosts_go_over_their_network():
    def seconds(text, group_size):
        one = Collective("all-gather", 10**9, "step", group_size=group_size)
        return estimate_step(parse_topology(text), {}, 0, [one]).communication

    assert seconds("h100:1x8", 8) == pytest.approx(7 / 8 * 1e9 / 450e9)
    assert seconds("h100:8x8", 8) == pytest.approx(7 / 8 * 1e9 / 450e9)
    assert seconds("h100:8x8", 64) == pytest.approx(63 / 64 * 1e9 / 400e9)
    assert seconds("v5e:16x16", 256) == pytest.approx(255 / 256 * 1e9 / 200e9)
