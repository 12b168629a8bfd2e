"""Tests that correct reductions are accepted, and equal one device.

Each step reduces more than once, and was once refused by mistake.
"""

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

import armillary
from armillary import (
    all_reduce,
    compute_average_loss,
    scale_regularization_loss,
)
from armillary.errors import DoubleReductionError
from tests.distribute.losses import (
    AROUND,
    WIDTH,
    average,
    check,
    mean,
    on_replicas,
    squares,
)

pytestmark = pytest.mark.usefixtures("float64")


def count():
    return armillary.get_replica_context().num_replicas_in_sync


def gradient_of(loss_fn, op):
    return lambda w, b: all_reduce(op, jax.grad(loss_fn)(w, b))


def standardized(w, b):
    """Returns activations as batch normalization makes them, of all replicas."""
    rows = b["x"] * w
    centre = jax.lax.pmean(rows.mean(0), "replica")
    spread = jax.lax.pmean((rows**2).mean(0), "replica") - centre**2
    return (jnp.tanh((rows - centre) / jnp.sqrt(spread + 1)).sum(1) - b["y"]) ** 2


def contrastive(w, b):
    own = jnp.tanh(b["x"] * w)
    every = jax.lax.all_gather(own, "replica", tiled=True)
    return jax.nn.logsumexp(own @ every.T, axis=1)


def balance(w, b):
    return jnp.sum(jax.lax.pmean(jnp.tanh(b["x"] * w).mean(0), "replica") ** 2)


def clipped(w, b):
    grads = gradient_of(average, "sum")(w, b)
    return optax.clip_by_global_norm(0.1).update(grads, optax.EmptyState())[0]


def trained(transform, op="sum", loss_fn=average):
    """Returns updates in a loop, each with the state of an optimizer."""

    def step_fn(w, b):
        def update(carry, _):
            w, state = carry
            grads = gradient_of(loss_fn, op)(w, b)
            updates, state = transform.update(grads, state, w)
            return (optax.apply_updates(w, updates), state), None

        return jax.lax.scan(update, (w, transform.init(w)), length=4)[0]

    return step_fn


def rivals(w, b):
    """Updates one that the other's loss needs, and then the other (a GAN)."""

    def game(one, other):
        return compute_average_loss(squares(one, b) * jnp.tanh(b["x"] @ other))

    one = w - 0.1 * all_reduce("sum", jax.grad(game)(w, 2 * w))
    other = 2 * w + 0.1 * all_reduce("sum", jax.grad(game, 1)(one, 2 * w))
    slow = optax.incremental_update(one, w, 0.1)
    return one, other, slow


def sharpness_aware(w, b):
    grads = gradient_of(average, "sum")(w, b)
    return gradient_of(average, "sum")(w + 0.05 * grads / jnp.linalg.norm(grads), b)


def curvature(op, loss_fn):
    def step_fn(w, b):
        whole = armillary.over_replicas(lambda w: loss_fn(w, b), op)
        product = jax.jvp(jax.grad(whole), (w,), (jnp.cos(w),))[1]
        return product, jax.hessian(whole)(w)

    return step_fn


def split_update(w, b):
    """Reduces each replica's part of the gradient alone (ZeRO)."""
    own = jax.grad(lambda w: average(w[:WIDTH], b))(jnp.tile(w, 4))
    part = jax.lax.psum_scatter(own, "replica", tiled=True)
    return jax.lax.all_gather(0.1 * part, "replica", tiled=True)


def logged(w, b):
    loss, grads = jax.value_and_grad(average)(w, b)
    jax.debug.callback(lambda *_: None, loss, grads)
    grads = all_reduce("sum", grads)
    return grads, all_reduce("mean", loss * count()), jax.lax.pmax(grads, "replica")


def dropped(w, b):
    kept = jax.random.bernoulli(jax.random.key(0), 0.5, w.shape)
    return average(w * kept, b)


def multiplied(w, b):
    """Weighs a constraint by a multiplier that the same step has updated."""
    multiplier = 1 + all_reduce("mean", jnp.mean(b["x"] @ w))
    constraint = compute_average_loss(b["x"] @ w)
    return average(w, b) + jax.lax.stop_gradient(multiplier) * constraint


def in_context(p, b):
    """Returns a loss whose bias acts through a mean over all examples alone."""
    context = all_reduce("mean", jnp.mean(b["x"] @ p["kernel"]) + p["bias"])
    return compute_average_loss((b["x"] @ p["kernel"] * context - b["y"]) ** 2)


def updated_in_context(w, b):
    grads = jax.grad(in_context)({"kernel": w, "bias": jnp.ones(())}, b)
    return all_reduce("sum", grads)


def decayed_after_an_update(w, b):
    """Differentiates a scaled penalty of weights that were updated before."""
    w = w - 0.1 * gradient_of(average, "sum")(w, b)
    return gradient_of(lambda w, b: scale_regularization_loss(w**2), "sum")(w, b)


def searched(w, b):
    """Returns an update whose length a search finds, by losses of all examples."""

    def hinges(w):  # linear, as far as labels are followed
        return compute_average_loss(jnp.maximum(1 - b["y"] * (b["x"] @ w), 0))

    loss = armillary.over_replicas(hinges, "sum")
    value, grads = jax.value_and_grad(loss)(w)
    search = optax.chain(optax.sgd(1.0), optax.scale_by_backtracking_linesearch(10))
    state, whole = search.init(w), {"value": value, "grad": grads, "value_fn": loss}
    return search.update(grads, state, w, **whole)[0]


RIGHT = {
    "synchronized statistics, sum": gradient_of(
        lambda w, b: compute_average_loss(standardized(w, b)), "sum"
    ),
    "synchronized statistics, mean": gradient_of(
        lambda w, b: jnp.mean(standardized(w, b)), "mean"
    ),
    "contrastive, sum": gradient_of(
        lambda w, b: compute_average_loss(contrastive(w, b)), "sum"
    ),
    "contrastive, mean": gradient_of(lambda w, b: jnp.mean(contrastive(w, b)), "mean"),
    "balance of experts, mean": gradient_of(
        lambda w, b: mean(w, b) + balance(w, b), "mean"
    ),
    "balance of experts, scaled, sum": gradient_of(
        lambda w, b: average(w, b) + scale_regularization_loss(balance(w, b)), "sum"
    ),
    "a reduced loss, mean": gradient_of(
        lambda w, b: jax.lax.pmean(mean(w, b), "replica"), "mean"
    ),
    "a mean of what is reduced": lambda w, b: all_reduce(
        "mean", gradient_of(mean, "mean")(w, b)
    ),
    "a plain mean, summed and divided": lambda w, b: (
        gradient_of(mean, "sum")(w, b) / count()
    ),
    "loss scaling": lambda w, b: (
        gradient_of(lambda w, b: 1024 * average(w, b), "sum")(w, b) / 1024
    ),
    "an average times replicas, as it is reported": lambda w, b: all_reduce(
        "mean", average(w, b) * count()
    ),
    "a sum of weights in the loss": gradient_of(
        lambda w, b: (
            jnp.sum(squares(w, b) * b["y"] ** 2)
            / all_reduce("sum", jnp.sum(b["y"] ** 2))
        ),
        "sum",
    ),
    "clipped by the norm": clipped,
    "micro steps, adam": trained(optax.adam(0.1)),
    "micro steps, adam, mean": trained(optax.adam(0.1), "mean", mean),
    "micro steps, MultiSteps": trained(optax.MultiSteps(optax.adam(0.1), 2)),
    "micro steps, an average of weights": trained(
        optax.chain(optax.sgd(0.1), optax.ema(0.9))
    ),
    "two updates (GAN, EMA)": rivals,
    "a line search": searched,
    "sharpness-aware": sharpness_aware,
    "second derivatives of all, mean": curvature("mean", mean),
    "second derivatives of all, sum": curvature("sum", average),
    "parts of gradients": split_update,
    "dropout of weights": gradient_of(dropped, "sum"),
    "a multiplier": gradient_of(multiplied, "sum"),
    "weight decay alone, scaled": gradient_of(
        lambda w, b: scale_regularization_loss(w**2), "sum"
    ),
    "what is printed": logged,
    "balance of experts alone, scaled, sum": gradient_of(
        lambda w, b: scale_regularization_loss(balance(w, b)), "sum"
    ),
    "a bias of a context of all examples, sum": updated_in_context,
    "weight decay of updated weights, scaled": decayed_after_an_update,
}
# Right by a factor that is not looked for. `jnp.mean` says the same.
REFUSED = {
    "an average times replicas": lambda w, b: count() * average(w, b),
    "a ratio of averages": lambda w, b: (
        average(w, b) / compute_average_loss(b["y"] ** 0)
    ),
}


@pytest.mark.parametrize("loss_fn", REFUSED.values(), ids=REFUSED)
def test_the_mean_of_what_was_divided_is_refused(loss_fn, make_mirrored):
    with pytest.raises(DoubleReductionError, match="be the plain mean over this repl"):
        on_replicas(make_mirrored(2), gradient_of(loss_fn, "mean"))


@pytest.mark.parametrize("step_fn", RIGHT.values(), ids=RIGHT)
def test_correct_reductions_equal_one_replica(step_fn, make_mirrored):
    expected = on_replicas(make_mirrored(1), step_fn)
    for num_replicas in (2, 4):
        check(on_replicas(make_mirrored(num_replicas), step_fn), expected)


def counted(w, b):
    """Counts replicas with data by a sum, as steps written for `pmap` do."""
    total = len(b["y"]) * jax.lax.psum(jnp.ones(()), "replica")
    return jnp.sum(squares(w, b)) / total


def reduced_again(w, b):
    scale = all_reduce("mean", all_reduce("mean", jnp.mean(b["y"] ** 2)))
    return average(w, b) * scale


LOSSES = {
    "an average": (average, "sum"),
    "a mean": (mean, "mean"),
    "synchronized statistics": (
        lambda w, b: compute_average_loss(standardized(w, b)),
        "sum",
    ),
    "contrastive": (lambda w, b: compute_average_loss(contrastive(w, b)), "sum"),
    "balance of experts": (lambda w, b: mean(w, b) + balance(w, b), "mean"),
    "a count of replicas": (counted, "sum"),
    "a mean of a mean": (reduced_again, "sum"),
}


@pytest.mark.slow
@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize("name", LOSSES)
def test_a_correct_reduction_is_accepted_behind(name, around, make_mirrored):
    loss_fn, op = LOSSES[name]
    expected = on_replicas(make_mirrored(1), gradient_of(loss_fn, op))
    step_fn = gradient_of(AROUND[around](loss_fn), op)
    check(on_replicas(make_mirrored(2), step_fn), expected)


def test_the_loss_of_all_may_draw_random_numbers(make_mirrored):
    model = nnx.Dict(
        linear=nnx.Linear(WIDTH, 1, rngs=nnx.Rngs(0)),
        dropout=nnx.Dropout(0.5, rngs=nnx.Rngs(1)),
    )

    def loss_fn(model, b):
        return jnp.mean((model.linear(model.dropout(b["x"]))[:, 0] - b["y"]) ** 2)

    def step_fn(w, b):
        del w
        of_all = nnx.grad(armillary.over_replicas(loss_fn))(model, b)
        model.dropout.rngs.count[...] -= 1
        return of_all, all_reduce("mean", nnx.grad(loss_fn)(model, b))

    check(*on_replicas(make_mirrored(2), step_fn))
