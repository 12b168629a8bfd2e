"""Loops and branches in a replica, which give what they give on one device."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import armillary


@pytest.fixture
def strategy(make_mirrored):
    return make_mirrored(2)


@pytest.fixture
def rows(strategy, put_rows):
    return put_rows(strategy, [1, 2])


@pytest.mark.slow
@pytest.mark.parametrize("make_cell", [nnx.LSTMCell, nnx.GRUCell])
def test_a_recurrent_model_trains(strategy, make_cell):
    sequences = np.random.default_rng(0).normal(size=(4, 5, 3)).astype(np.float32)

    def train(strategy):
        model = nnx.RNN(make_cell(3, 2, rngs=nnx.Rngs(0)), rngs=nnx.Rngs(1))
        optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
        (batch,) = strategy.distribute_dataset([sequences])

        @armillary.function
        def step(batch):
            def step_fn(x):
                def loss_fn(model):
                    per_example = jnp.mean((model(x) - 1) ** 2, axis=(1, 2))
                    return armillary.compute_average_loss(per_example)

                loss, grads = nnx.value_and_grad(loss_fn)(model)
                grads = armillary.all_reduce("sum", grads)
                optimizer.update(model, grads)
                return loss

            return strategy.reduce("sum", strategy.run(step_fn, args=(batch,)))

        return [float(step(batch)) for _ in range(3)]

    losses = train(strategy)
    assert losses[2] < losses[0]
    np.testing.assert_allclose(losses, train(armillary.DefaultStrategy()), rtol=1e-5)


def test_a_scan_may_begin_with_a_shared_carry(strategy, rows):
    def step_fn(x):
        def body(carry, y):
            total, count = carry
            return (total + x * y, count + 1), total

        return jax.lax.scan(body, (jnp.zeros(()), 0), jnp.arange(3.0))

    (total, count), history = strategy.run(step_fn, args=(rows,))
    np.testing.assert_array_equal(total.stacked, [3, 6])
    np.testing.assert_array_equal(count.stacked, [3, 3])
    np.testing.assert_array_equal(history.stacked, [[0, 0, 1], [0, 0, 2]])


def test_a_scan_without_inputs(strategy, rows):
    result = strategy.run(
        lambda x: jax.lax.scan(
            lambda c, _: (c + x, None), init=jnp.zeros(()), xs=None, length=3
        )[0],
        args=(rows,),
    )
    np.testing.assert_array_equal(result.stacked, [3, 6])


def test_a_difference_spreads_from_leaf_to_leaf(strategy, rows):
    def step_fn(x):
        def body(carry, _):
            a, b, c = carry
            return (a + x, b + a, c + b), None

        zero = jnp.zeros(())
        return jax.lax.scan(body, (zero, zero, zero), None, length=3)[0]

    a, b, c = strategy.run(step_fn, args=(rows,))
    np.testing.assert_array_equal(a.stacked, [3, 6])
    np.testing.assert_array_equal(b.stacked, [3, 6])
    np.testing.assert_array_equal(c.stacked, [1, 2])


def test_a_while_loop_may_begin_with_a_shared_carry(strategy, rows):
    def step_fn(x):
        return jax.lax.while_loop(
            lambda carry: carry[1] < 3,
            lambda carry: (carry[0] + x, carry[1] + 1),
            (jnp.zeros(()), 0),
        )

    total, count = strategy.run(step_fn, args=(rows,))
    np.testing.assert_array_equal(total.stacked, [3, 6])
    np.testing.assert_array_equal(count.stacked, [3, 3])


@pytest.mark.parametrize("is_traced", [False, True])
def test_a_fori_loop_may_begin_with_a_shared_carry(strategy, rows, is_traced):
    def step_fn(x):
        bound = jnp.int32(3) if is_traced else 3
        return jax.lax.fori_loop(0, bound, lambda i, c: c + x, jnp.zeros(()))

    result = strategy.run(step_fn, args=(rows,))
    np.testing.assert_array_equal(result.stacked, [3, 6])


def test_a_branch_may_return_a_shared_value(strategy, rows):
    def step_fn(x, shared):
        return jax.lax.cond(x > 1, lambda: x, lambda: shared)

    result = strategy.run(step_fn, args=(rows, jnp.zeros(())))
    np.testing.assert_array_equal(result.stacked, [0, 2])


def test_a_scan_inside_a_scan(strategy, rows):
    def inner(x, carry):
        return jax.lax.scan(lambda c, _: (c + x, None), carry, length=2)[0]

    def step_fn(x):
        return jax.lax.scan(
            lambda c, _: (c + inner(x, jnp.zeros(())), None), jnp.zeros(()), length=2
        )[0]

    np.testing.assert_array_equal(strategy.run(step_fn, args=(rows,)).stacked, [4, 8])
