"""Tests of `compute_average_loss` and `scale_regularization_loss`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

import armillary
from armillary import all_reduce, compute_average_loss, scale_regularization_loss
from armillary.errors import BatchSizeError, ReplicaMismatchError

shapes = st.lists(st.integers(1, 4), min_size=1, max_size=3).map(tuple)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(
    shape=shapes,
    weight_axes=st.none() | st.integers(0, 3),
    global_batch_size=st.none() | st.integers(1, 64),
    seed=st.integers(0, 2**16),
)
def test_the_average_equals_the_average_of_numpy(
    shape, weight_axes, global_batch_size, seed
):
    rng = np.random.default_rng(seed)
    losses = rng.normal(size=shape).astype(np.float32)
    weights = None
    expected = losses.astype(np.float64)
    if weight_axes is not None:
        weights = rng.uniform(0, 2, shape[:weight_axes]).astype(np.float32)
        expected = expected * weights.reshape(
            weights.shape + (1,) * (len(shape) - weights.ndim)
        )
    average = compute_average_loss(losses, weights, global_batch_size)
    assert average.shape == () and average.dtype == jnp.float32
    expected = expected.sum() / (global_batch_size or shape[0])
    np.testing.assert_allclose(average, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@settings(max_examples=30, deadline=None)
@given(shape=st.lists(st.integers(0, 4), max_size=3).map(tuple))
def test_the_regularization_loss_is_summed(shape):
    loss = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    np.testing.assert_allclose(scale_regularization_loss(loss), loss.sum())


def test_the_default_divisor_counts_replicas_with_data(make_mirrored, put_rows):
    strategy = make_mirrored(4)
    rows = [[1, 2], [3, 4], [5, 6], [np.nan, np.nan]]
    args = (put_rows(strategy, rows, num_active=3),)
    average = strategy.run(compute_average_loss, args=args)
    assert float(strategy.reduce("sum", average)) == pytest.approx(21 / 6)


@pytest.mark.parametrize("size", [4, np.int64(4)])
def test_the_global_batch_size_may_be_given(size, make_mirrored):
    with make_mirrored(2).scope():
        average = compute_average_loss(jnp.ones(3), global_batch_size=size)
    assert float(average) == 0.75


def test_the_dtype_of_losses_is_kept():
    losses = jnp.ones(4, jnp.bfloat16)
    weights = np.ones(4, np.float32)
    assert compute_average_loss(losses, weights).dtype == jnp.bfloat16


@pytest.mark.parametrize("shape", [(3,), (4, 2, 1)])
def test_weights_of_another_shape_are_an_error(shape):
    with pytest.raises(ValueError, match="must be the first axes of the losses"):
        compute_average_loss(jnp.ones((4, 2)), np.ones(shape))


def test_the_sum_of_scaled_penalties_is_the_penalty(make_mirrored):
    for count in (1, 2, 4):
        strategy = make_mirrored(count)
        parts = strategy.run(scale_regularization_loss, args=(jnp.asarray([2.5, 6.2]),))
        assert float(strategy.reduce("sum", parts)) == pytest.approx(8.7)
        losses = strategy.run(lambda: compute_average_loss(jnp.asarray([1.0, 4.0])))
        assert float(strategy.reduce("sum", losses)) == pytest.approx(2.5)


def test_parts_of_a_whole_stay_parts_in_a_function(make_mirrored):
    strategy = make_mirrored(2)

    @armillary.function
    def step(penalty):
        parts = strategy.run(scale_regularization_loss, args=(penalty,))
        return parts, strategy.reduce("sum", parts)

    parts, total = step(jnp.asarray(3.0))
    assert parts.is_shared and parts.is_part
    assert float(total) == float(strategy.reduce("sum", parts)) == 3


def make_rows(strategy, count=16):
    dataset = strategy.distribute_dataset(
        armillary.data.from_arrays(np.arange(count, dtype="float32"), batch_size=count)
    )
    return next(iter(dataset))


@pytest.mark.parametrize("size", [4, 8, 15])
def test_a_batch_size_smaller_than_the_batch_is_an_error(size, make_mirrored):
    strategy = make_mirrored(4)
    message = rf"is {size}, but .* got 16 examples, 4 on each of 4 .*batch_size=16`"
    with pytest.raises(BatchSizeError, match=message):
        strategy.run(
            lambda x: compute_average_loss(x, global_batch_size=size),
            args=(make_rows(strategy),),
        )


def test_a_batch_size_smaller_than_the_batch_is_an_error_in_parts(make_mirrored):
    strategy = make_mirrored(2)
    unused = nnx.Param(jnp.zeros(()))

    def step_fn(batch, size):
        def loss_fn(part):
            return compute_average_loss(part, global_batch_size=size) + 0 * unused[...]

        loss, _ = armillary.value_and_grad(
            loss_fn, [unused], batch=batch, accumulate_steps=2
        )
        return loss

    batch = make_rows(strategy)
    assert float(strategy.reduce("sum", strategy.run(step_fn, (batch, 16)))) == 7.5
    with pytest.raises(BatchSizeError, match=r"is 8, but .* got 16 examples"):
        strategy.run(step_fn, args=(batch, 8))


@pytest.mark.parametrize("size", [16, 32, jnp.asarray(16)])
def test_a_batch_size_of_the_batch_or_of_several_is_taken(size, make_mirrored):
    strategy = make_mirrored(4)
    parts = strategy.run(
        lambda x: compute_average_loss(x, global_batch_size=size),
        args=(make_rows(strategy),),
    )
    assert float(strategy.reduce("sum", parts)) == 120 / int(size)


def test_losses_of_parts_of_examples_may_have_any_divisor(make_mirrored):
    strategy = make_mirrored(4)

    def step_fn(x):
        losses = jnp.repeat(x, 3)  # three tokens of each example
        return compute_average_loss(losses, global_batch_size=16)

    parts = strategy.run(step_fn, args=(make_rows(strategy),))
    assert float(strategy.reduce("sum", parts)) == 3 * 7.5


def test_the_batch_size_may_be_traced(make_mirrored):
    strategy = make_mirrored(4)

    def step_fn(x, size):
        total = all_reduce("sum", jnp.asarray(x.shape[0]))
        losses = [compute_average_loss(x, None, n) for n in (size, total)]
        return all_reduce("sum", losses)

    run = jax.jit(lambda x, size: strategy.run(step_fn, (x, size)))
    given, summed = run(make_rows(strategy), 16)
    assert float(given.array) == float(summed.array) == 7.5
    alone = jax.jit(lambda n: compute_average_loss(jnp.ones(3), None, n))(6)
    assert float(alone) == 0.5


def test_a_traced_batch_size_must_be_equal_on_all_replicas(make_mirrored):
    strategy = make_mirrored(4)

    def step_fn(x):
        num_examples = jnp.sum(x > 3).astype(int)
        return all_reduce("sum", compute_average_loss(x, None, num_examples))

    message = r"(?s)`global_batch_size` .* may differ .*test_loss.py.*num_examples\)`"
    with pytest.raises(ReplicaMismatchError, match=message):
        strategy.run(step_fn, args=(make_rows(strategy),))


@pytest.mark.parametrize("size", [0, -1, jnp.ones(2, int), jnp.float32(4)])
def test_an_array_as_a_batch_size_is_one_positive_integer(size):
    with pytest.raises(ValueError, match=r"`global_batch_size` is .*positive integer"):
        compute_average_loss(jnp.ones(4), global_batch_size=size)


def test_a_traced_batch_size_does_not_fit_a_part_of_the_batch(make_mirrored):
    strategy = make_mirrored(2)
    unused = nnx.Param(jnp.zeros(()))

    def step_fn(batch, size):
        def loss_fn(part):
            return compute_average_loss(part, global_batch_size=size) + 0 * unused[...]

        loss, _ = armillary.value_and_grad(
            loss_fn, [unused], batch=batch, accumulate_steps=2
        )
        return loss

    with pytest.raises(ValueError, match="`global_batch_size` is an array, and grad"):
        strategy.run(step_fn, args=(make_rows(strategy), jnp.asarray(16)))


@pytest.mark.parametrize("size", [0, 2.0, True])
def test_a_wrong_global_batch_size_is_an_error(size):
    with pytest.raises((TypeError, ValueError), match="`global_batch_size` is"):
        compute_average_loss(jnp.ones(4), global_batch_size=size)
