"""Tests of which reduction trains each common loss as on one device.

Each of these losses once trained a different model on four replicas, without an error.
The reference is plain JAX with the whole batch, in float64.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import armillary
from armillary import compute_average_loss, weighted_mean
from tests.distribute.losses import DATA, ROWS, WIDTH, W, check, on_replicas, squares
from tests.tiers import slow_after_first

COUNTS = [1, 2, 4]


pytestmark = pytest.mark.usefixtures("float64")


def rows_of_tokens(w, b):
    return jnp.log1p((b["x"].reshape(-1, 3, 2) * w.reshape(3, 2)) ** 2).sum(2)


def reduced(strategy, loss_fn, op, data=DATA):
    """Returns the loss and its gradient, reduced over replicas."""
    both = jax.value_and_grad(loss_fn)
    return on_replicas(
        strategy, lambda w, b: armillary.all_reduce(op, both(w, b)), data
    )


def on_one_device(loss_fn, data=DATA):
    batch = {name: jnp.asarray(array) for name, array in data.items()}
    return jax.jit(jax.value_and_grad(loss_fn))(W, batch)


MEANS = {
    "jnp.mean": lambda w, b: jnp.mean(squares(w, b)),
    "sum by len": lambda w, b: squares(w, b).sum() / len(b["y"]),
    "sum by a sum of ones": lambda w, b: (
        squares(w, b).sum() / jnp.ones(len(b["y"])).sum()
    ),
    "jnp.average": lambda w, b: jnp.average(squares(w, b)),
    "mean of a vmap": lambda w, b: jnp.mean(
        jax.vmap(lambda x, y: (x @ w - y) ** 2)(b["x"], b["y"])
    ),
    "mean within a jit": lambda w, b: jax.jit(jnp.mean)(squares(w, b)),
    "masked, by the number of examples": lambda w, b: jnp.mean(
        squares(w, b) * b["mask"]
    ),
    "penalty as it is": lambda w, b: jnp.mean(squares(w, b)) + 0.1 * jnp.sum(w**2),
    "a second mean": lambda w, b: (
        jnp.mean(squares(w, b)) + jnp.mean(jnp.abs(b["x"] @ w))
    ),
    "losses (B, T)": lambda w, b: jnp.mean(rows_of_tokens(w, b)),
    "losses (T, B)": lambda w, b: jnp.mean(jnp.stack([squares(w, b)] * 2)),
    "losses (1, B)": lambda w, b: jnp.mean(squares(w, b)[None]),
    "sum over tokens": lambda w, b: jnp.mean(rows_of_tokens(w, b).sum(1)),
}


@pytest.mark.slow
@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("name", MEANS)
def test_a_mean_of_examples_with_penalties_takes_the_mean(name, count, make_mirrored):
    actual = reduced(make_mirrored(count), MEANS[name], "mean")
    check(actual, on_one_device(MEANS[name]))


# The loss on one device, and the loss of a replica.
WEIGHTED = {
    "sum by the sum of a mask": (
        lambda w, b: (squares(w, b) * b["mask"]).sum() / b["mask"].sum(),
        lambda w, b: weighted_mean(squares(w, b), b["mask"]),
    ),
    "jnp.mean(where=)": (
        lambda w, b: jnp.mean(squares(w, b), where=b["mask"] > 0),
        lambda w, b: weighted_mean(squares(w, b), b["mask"] > 0),
    ),
    "jnp.average(weights=)": (
        lambda w, b: jnp.average(squares(w, b), weights=b["y"] ** 2),
        lambda w, b: weighted_mean(squares(w, b), b["y"] ** 2),
    ),
    "a mask of tokens": (
        lambda w, b: (rows_of_tokens(w, b) * b["tokens"]).sum() / b["tokens"].sum(),
        lambda w, b: weighted_mean(rows_of_tokens(w, b), b["tokens"]),
    ),
    "weights of examples for tokens": (
        lambda w, b: jnp.average(rows_of_tokens(w, b).mean(1), weights=b["mask"]),
        lambda w, b: weighted_mean(rows_of_tokens(w, b), b["mask"]),
    ),
    "with a penalty": (
        lambda w, b: jnp.average(squares(w, b), weights=b["mask"]) + jnp.sum(w**2),
        lambda w, b: weighted_mean(squares(w, b), b["mask"]) + jnp.sum(w**2),
    ),
    "weights of parameters": (
        lambda w, b: jnp.average(squares(w, b), weights=jax.nn.softplus(b["x"] @ w)),
        lambda w, b: weighted_mean(squares(w, b), jax.nn.softplus(b["x"] @ w)),
    ),
    "only the first examples weigh": (
        lambda w, b: squares(w, b)[: ROWS // 4].mean(),
        lambda w, b: weighted_mean(squares(w, b), is_early(b)),
    ),
}


def is_early(b):
    """Returns weights that are 0 on all replicas but the first."""
    bound = DATA["y"][: ROWS // 4]
    return jnp.any(b["y"][:, None] == bound, axis=1)


@pytest.mark.slow
@pytest.mark.parametrize("num_rows", [1, 13, 21, 22])
@pytest.mark.parametrize("name", ["a mask of tokens", "weights of parameters"])
def test_weighted_parts_of_an_uneven_batch_do_too(name, num_rows, make_mirrored):
    plain, part = WEIGHTED[name]
    data = {name: array[-num_rows:] for name, array in DATA.items()}
    actual = reduced(make_mirrored(4), part, "mean", data)
    check(actual, on_one_device(plain, data))


@pytest.mark.parametrize("count", COUNTS)
def test_weights_that_are_all_zero_give_zero(count, make_mirrored):
    def part(w, b):
        return weighted_mean(squares(w, b), 0 * b["mask"])

    check(reduced(make_mirrored(count), part, "mean"), (0.0, np.zeros(WIDTH)))


def gathered(values):
    return jax.lax.all_gather(values, "replica", tiled=True)


def similarities(own, every):
    return jax.nn.logsumexp(jnp.tanh(own) @ jnp.tanh(every).T, axis=1)


def over_all(value):
    return armillary.all_reduce("mean", value)


# The loss on one device, and its equivalent on several replicas.
NO_MEANS = {
    "a root of a mean": (
        lambda w, b: jnp.sqrt(jnp.mean(squares(w, b))),
        lambda w, b: jnp.sqrt(over_all(jnp.mean(squares(w, b)))),
    ),
    "a ratio of sums (Dice)": (
        lambda w, b: squares(w, b).sum() / (1 + jnp.abs(b["x"] @ w)).sum(),
        lambda w, b: (
            over_all(squares(w, b).sum()) / over_all((1 + jnp.abs(b["x"] @ w)).sum())
        ),
    ),
    "losses (B, B)": (
        lambda w, b: jnp.mean((b["x"] @ w[:, None] - b["y"]) ** 2),
        lambda w, b: jnp.mean((b["x"] @ w[:, None] - gathered(b["y"])) ** 2),
    ),
    "contrastive": (
        lambda w, b: jnp.mean(similarities(b["x"] * w, b["x"] * w)),
        lambda w, b: jnp.mean(similarities(b["x"] * w, gathered(b["x"] * w))),
    ),
    "centred by the batch": (
        lambda w, b: jnp.var(b["x"] @ w),
        lambda w, b: jnp.mean((b["x"] @ w - over_all(jnp.mean(b["x"] @ w))) ** 2),
    ),
    "a product of means": (
        lambda w, b: jnp.mean(squares(w, b)) * jnp.mean(jnp.abs(b["x"] @ w)),
        lambda w, b: (
            over_all(jnp.mean(squares(w, b))) * over_all(jnp.mean(jnp.abs(b["x"] @ w)))
        ),
    ),
    "a masked mean": WEIGHTED["sum by the sum of a mask"],
}


@slow_after_first("name", NO_MEANS)
def test_a_sharded_strategy_gives_the_numbers_of_one_device(name):
    strategy = armillary.ShardedStrategy(devices=jax.devices()[:4])
    plain, _ = NO_MEANS[name]
    check(reduced(strategy, plain, "mean"), on_one_device(plain))


PARTS = {**WEIGHTED, **NO_MEANS}


@pytest.mark.slow
@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("name", PARTS)
def test_the_mean_of_weighted_parts_and_ways_out_is_right(name, count, make_mirrored):
    plain, way_out = PARTS[name]
    check(reduced(make_mirrored(count), way_out, "mean"), on_one_device(plain))


@slow_after_first("name", PARTS)
def test_weighted_parts_and_ways_out_have_second_derivatives(name, make_mirrored):
    plain, way_out = PARTS[name]
    expected = jax.jit(jax.hessian(lambda w: plain(w, DATA)))(W)
    hessian = jax.hessian(armillary.over_replicas(way_out))
    for count in COUNTS:
        check(on_replicas(make_mirrored(count), hessian), expected, 1e-8)


# As one writes it for "sum", and how many times the number of one device it is.
SCALED = {
    "compute_average_loss": (
        lambda w, b, n: compute_average_loss(squares(w, b)),
        lambda n: 1,
    ),
    "by the number of replicas": (
        lambda w, b, n: jnp.mean(squares(w, b)) / n,
        lambda n: 1,
    ),
    "by a number of examples": (
        lambda w, b, n: squares(w, b).sum() / ROWS,
        lambda n: 1,
    ),
    "not divided": (lambda w, b, n: jnp.mean(squares(w, b)), lambda n: n),
}


@pytest.mark.slow
@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("name", SCALED)
def test_a_sum_is_of_what_the_step_has_divided(name, count, make_mirrored):
    loss_fn, times = SCALED[name]
    actual = reduced(make_mirrored(count), lambda w, b: loss_fn(w, b, count), "sum")
    once = on_one_device(MEANS["jnp.mean"])
    check(actual, jax.tree.map(lambda value: value * times(count), once))
