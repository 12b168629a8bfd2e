"""Tests of programs that leak between replicas with the wrong reduction.

Each program computes a loss for every example, from a parameter `w` of shape `(3,)` and
rows `x` of shape `(batch, 3)`. Its gradient must not depend on the number of replicas.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import armillary
from armillary.distribute import ReduceOp
from armillary.errors import DoubleReductionError, ReplicaMismatchError

ROWS = np.random.default_rng(0).normal(size=(8, 3)).astype(np.float32)
W = np.array([0.5, -1.0, 0.75], np.float32)


def each(fn):
    """Returns a loss of a batch from one of a row."""

    def losses(w, x):
        return jnp.stack([fn(w, row) for row in x])

    return losses


def with_own_backward(backward):
    @jax.custom_vjp
    def product(w, row):
        return row @ w

    product.defvjp(lambda w, row: (row @ w, (w, row)), backward)
    return product


def gradient(strategy, losses, w=W):
    """Returns the gradient of the average loss over `ROWS`, on each replica."""
    (batch,) = strategy.distribute_dataset([ROWS])

    def step_fn(w, x):
        return armillary.all_reduce(
            "sum", jax.grad(lambda w: armillary.compute_average_loss(losses(w, x)))(w)
        )

    result = strategy.run(step_fn, args=(jnp.asarray(w), batch))
    return [np.asarray(part) for part in strategy.local_results(result)]


def test_values_summed_by_a_backward_pass_are_not_summed_again(make_mirrored):
    def backward(res, g):
        context = armillary.get_replica_context()
        return context.all_reduce(ReduceOp.SUM, g * res[1]), g * res[0]

    losses = each(with_own_backward(backward))
    with pytest.raises(DoubleReductionError, match=r"already reduced at .*test_leaks"):
        gradient(make_mirrored(2), losses)


STATES = {
    "cond": lambda w, x: jax.lax.cond(x[0, 0] > 0, lambda: w, lambda: w - 1),
    "sort": lambda w, x: w[jnp.argsort(x[0])],
    "while": lambda w, x: jax.lax.while_loop(
        lambda v: jnp.sum(v) < jnp.sum(x > 0), lambda v: v + 1, w
    ),
    "callback": lambda w, x: jax.pure_callback(
        lambda v: np.asarray(v), jax.ShapeDtypeStruct((3,), jnp.float32), w
    ),
    "callback without operands": lambda w, x: (
        w
        + jax.pure_callback(
            lambda: np.float32(1), jax.ShapeDtypeStruct((), jnp.float32)
        )
    ),
    "maximum within groups": lambda w, x: jax.lax.pmax(
        x[0], "replica", axis_index_groups=[[0], [1]]
    ),
}


@pytest.mark.parametrize("name", STATES)
def test_mirrored_state_that_may_differ_is_refused(name, make_mirrored):
    strategy = make_mirrored(2)
    variable = nnx.Variable(jnp.asarray(W))
    (batch,) = strategy.distribute_dataset([ROWS])

    def step_fn(x):
        variable[...] = STATES[name](variable[...], x)

    with pytest.raises(ReplicaMismatchError, match=r"variable \(plain, mirrored\)"):
        strategy.run(step_fn, args=(batch,))
    np.testing.assert_array_equal(variable[...], W)


@pytest.mark.slow
@pytest.mark.usefixtures("optimized")  # One of the numbers is close to 0.
@pytest.mark.parametrize("num_replicas", [1, 2, 4])
def test_state_that_is_returned_and_passed_in_again_stays_shared(
    num_replicas, make_mirrored
):
    strategy = make_mirrored(num_replicas)
    (batch,) = strategy.distribute_dataset([ROWS])

    def update(w, average, x):
        return w - 0.5 * armillary.all_reduce(
            "sum", jax.grad(lambda w: average(jnp.tanh(x @ w - 1) ** 2))(w)
        )

    @armillary.function
    def step(w, batch):
        return strategy.run(
            lambda w, x: update(w, armillary.compute_average_loss, x), args=(w, batch)
        )

    w = expected = jnp.asarray(W)
    for _ in range(4):
        w, expected = step(w, batch), update(expected, jnp.mean, ROWS)
    for part in strategy.local_results(w):
        np.testing.assert_allclose(part, expected, rtol=1e-5)


def test_state_that_no_share_of_a_batch_reaches_is_equal(make_mirrored):
    strategy = make_mirrored(2)
    (batch,) = strategy.distribute_dataset([ROWS])
    weights = nnx.Variable(jnp.asarray(W))
    optimizer_key = nnx.OptVariable(jax.random.key(0))
    first = jax.random.split(optimizer_key[...], 2)[1]

    def step_fn(x):
        del x
        weights[...] = weights[...] + 1
        optimizer_key[...] = jax.random.split(optimizer_key[...])[1]

    strategy.run(step_fn, args=(batch,))
    np.testing.assert_array_equal(weights[...], W + 1)
    assert jnp.array_equal(
        jax.random.key_data(optimizer_key[...]), jax.random.key_data(first)
    )
