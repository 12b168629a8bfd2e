"""Tests that a reduction which counts something twice is an error.

It is found behind a user's `jit`, loop, branch, backward pass and rematerialization.
"""

import jax
import jax.numpy as jnp
import pytest

import armillary
from armillary import all_reduce, compute_average_loss, scale_regularization_loss
from armillary.errors import DoubleReductionError
from tests.distribute.losses import (
    AROUND,
    ROWS,
    average,
    mean,
    on_replicas,
    squares,
)

pytestmark = pytest.mark.usefixtures("float64")


# A loss of weights and a batch, what comes between, and the last reduction.
SUMMED_TWICE = {
    "sum of a mean": (lambda w, b: all_reduce("mean", mean(w, b)), None, "sum"),
    "sum of a sum": (lambda w, b: all_reduce("sum", average(w, b)), None, "sum"),
    "gradients of a loss by pmean": (
        lambda w, b: jax.lax.pmean(mean(w, b), "replica"),
        jax.grad,
        "sum",
    ),
    "gradients of a loss by psum": (
        lambda w, b: jax.lax.psum(average(w, b), "replica"),
        jax.grad,
        "sum",
    ),
    "gradients of the loss of all": (
        armillary.over_replicas(mean),
        jax.grad,
        "sum",
    ),
    "gradients of a weighted mean": (
        lambda w, b: armillary.weighted_mean(squares(w, b), b["y"] ** 2),
        jax.grad,
        "sum",
    ),
    "gradients of an average, and a mean over all": (
        lambda w, b: average(w, b) + jax.lax.pmean(mean(w, b), "replica") ** 2,
        jax.grad,
        "sum",
    ),
    "gradients of a root of a mean over all": (
        lambda w, b: jnp.sqrt(all_reduce("mean", mean(w, b))),
        jax.grad,
        "sum",
    ),
}
DIVIDED_TWICE = {
    "mean of an average": (average, None, "mean"),
    "gradients of an average": (average, jax.grad, "mean"),
    "gradients of an average with a given size": (
        lambda w, b: compute_average_loss(squares(w, b), global_batch_size=ROWS),
        jax.grad,
        "mean",
    ),
    "gradients of a scaled penalty": (
        lambda w, b: mean(w, b) + scale_regularization_loss(w**2),
        jax.grad,
        "mean",
    ),
    "gradients of an average of all": (
        armillary.over_replicas(average),
        jax.grad,
        "mean",
    ),
}
TWICE = {**SUMMED_TWICE, **DIVIDED_TWICE}


# Around the loss stands everything; around the rest, one of each other kind.
PLACES = [("loss", around) for around in AROUND] + [
    (place, around)
    for place in ("gradient", "reduction")
    for around in ("jit of a named call", "scan", "cond", "checkpoint")
]


@pytest.mark.parametrize(("place", "around"), PLACES)
@pytest.mark.parametrize("name", TWICE)
def test_a_double_reduction_is_an_error_behind(name, around, place, make_mirrored):
    loss_fn, differentiate, op = TWICE[name]

    def reduce(w, value):
        del w
        return all_reduce(op, value)

    wrap = AROUND[around]
    loss_fn = wrap(loss_fn) if place == "loss" else loss_fn
    make = differentiate(loss_fn) if differentiate else loss_fn
    make = wrap(make) if place == "gradient" else make
    reduce = wrap(reduce) if place == "reduction" else reduce
    times = "large" if name in SUMMED_TWICE else "small"
    with pytest.raises(DoubleReductionError, match=f"times( too {times})?"):
        on_replicas(make_mirrored(2), lambda w, b: reduce(w, make(w, b)))
