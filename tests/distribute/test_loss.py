import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from armillary import compute_average_loss, scale_regularization_loss

shapes = st.lists(st.integers(1, 4), min_size=1, max_size=3).map(tuple)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(
    shape=shapes,
    weight_axes=st.none() | st.integers(0, 3),
    global_batch_size=st.none() | st.integers(1, 64),
    seed=st.integers(0, 2**16),
)
def test_the_average_is_that_of_numpy(shape, weight_axes, global_batch_size, seed):
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


@pytest.mark.parametrize("size", [0, 2.0, True])
def test_a_wrong_global_batch_size_is_an_error(size):
    with pytest.raises((TypeError, ValueError), match="`global_batch_size` is"):
        compute_average_loss(jnp.ones(4), global_batch_size=size)
