"""Tests that the arithmetic of a traced step is counted correctly."""

import itertools

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl

from armillary.xla._flops import count_flops, count_model_flops
from armillary.xla._peaks import find_peak_flops


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


BATCH, LENGTH, WIDTH, LAYERS = 2, 16, 8, 3


def block(x, weights):
    """One layer of a transformer with a single head, and a hidden layer of 4 x."""
    q, k, v = jnp.split(x @ weights["qkv"], 3, axis=-1)
    scores = jax.nn.softmax(q @ k.swapaxes(-1, -2))
    x = x + (scores @ v) @ weights["out"]
    return (
        x
        + jax.vmap(lambda row: jax.nn.gelu(row @ weights["up"]))(x) @ (weights["down"])
    )


def transformer_loss(weights, x, remat):
    layer = jax.checkpoint(block) if remat else block
    x, _ = jax.lax.scan(lambda x, each: (layer(x, each), None), x, weights)
    return x.sum()


@pytest.mark.parametrize("remat", [False, True])
def test_model_flops_of_a_transformer_are_six_per_weight_and_token(remat):
    sizes = {"qkv": 3, "out": 1, "up": 4}
    weights = {name: jnp.ones((LAYERS, WIDTH, n * WIDTH)) for name, n in sizes.items()}
    weights["down"] = jnp.ones((LAYERS, 4 * WIDTH, WIDTH))
    x = jnp.ones((BATCH, LENGTH, WIDTH))
    step = jax.make_jaxpr(jax.grad(transformer_loss, (0, 1)), static_argnums=2)
    program = step(weights, x, remat)

    num_weights = LAYERS * 12 * WIDTH**2
    num_tokens = BATCH * LENGTH
    # Each token meets each other token twice: as a key, and as a value.
    attention = LAYERS * 2 * BATCH * LENGTH**2 * WIDTH
    expected = 6 * (num_weights * num_tokens + attention)
    assert count_model_flops(program) == expected
    [all_of_them] = count_flops(program).values()
    assert (all_of_them > expected) == remat


def test_model_flops_of_an_mlp():
    sizes = 784, 128, 10

    def loss_fn(weights, x):
        return (jax.nn.relu(x @ weights[0]) @ weights[1]).sum()

    weights = [jnp.ones(pair) for pair in itertools.pairwise(sizes)]
    program = jax.make_jaxpr(jax.grad(loss_fn))(weights, jnp.ones((32, 784)))
    # The first layer needs no gradient of its input.
    assert count_model_flops(program) == 32 * (4 * 784 * 128 + 6 * 128 * 10)


def test_each_row_of_a_mixture_of_experts_counts_for_one_expert():
    x, weights = jnp.ones((12, 4)), jnp.ones((3, 4, 5))
    sizes = jnp.array([2, 6, 4])

    def loss_fn(x, weights):
        return jax.lax.ragged_dot(x, weights, sizes).sum()

    program = jax.make_jaxpr(jax.grad(loss_fn, (0, 1)))(x, weights)
    assert count_model_flops(program) == 6 * 12 * 4 * 5


def test_a_kernel_runs_for_each_block_of_its_grid():
    def kernel(left, right, out):
        out[...] = left[...] @ right[...]

    multiply = pl.pallas_call(
        kernel,
        grid=(2, 3),
        in_specs=[
            pl.BlockSpec((4, 8), lambda i, j: (i, 0)),
            pl.BlockSpec((8, 4), lambda i, j: (0, j)),
        ],
        out_specs=pl.BlockSpec((4, 4), lambda i, j: (i, j)),
        out_shape=jax.ShapeDtypeStruct((8, 12), jnp.float32),
        interpret=True,
    )
    assert count(multiply, jnp.ones((8, 8)), jnp.ones((8, 12))) == {
        "float32": 2 * 8 * 8 * 12
    }


@pytest.mark.parametrize(
    ("kind", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H100 NVL", 835e12),
        ("NVIDIA H200", 989e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA A100 80GB PCIe", 312e12),
        ("TPU v5 lite", 197e12),
        ("TPU v5p", 459e12),
        ("TPU v5", 459e12),
        ("TPU v4", 275e12),
        ("TPU v6 lite", 918e12),
        ("TPU v4 lite", None),
        ("NVIDIA H1000", None),
        ("cpu", None),
    ],
)
def test_peaks_are_found_by_the_kind_of_the_device(kind, peak):
    assert find_peak_flops(kind) == peak
