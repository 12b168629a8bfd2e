"""Tests of Keras losses in custom steps: the sum of means is an error."""

from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
from flax import nnx

import armillary
from armillary import all_reduce, compute_average_loss
from armillary.errors import DoubleReductionError

NUM_REPLICAS = 4
X = np.linspace(-1, 1, 16, dtype=np.float32)[:, None]
MEAN_OF_DISTANCES: Any = keras.losses.MeanAbsoluteError()
SUM: Any = keras.losses.MeanSquaredError(reduction="sum")
MEAN: Any = keras.losses.MeanSquaredError()


def differentiate(loss_fn):
    """Returns the gradients of a loss of `(labels, predictions)` by one weight."""

    def step_fn(batch):
        def loss_of(weight):
            return loss_fn(3 * batch, weight * batch)

        return jax.grad(loss_of)(1.0)

    return step_fn


def run(step_fn):
    strategy = armillary.MirroredStrategy(jax.devices()[:NUM_REPLICAS])
    dataset = strategy.distribute_dataset(armillary.data.from_arrays(X, batch_size=16))
    return strategy.run(step_fn, args=(next(iter(dataset)),))


def scaled(gradient):
    return gradient / NUM_REPLICAS


EXPECTED = -4 * np.mean(X**2)
MISTAKES = {
    "a mean": MEAN,
    "a mean with weights": lambda y, p: MEAN(y, p, sample_weight=jnp.ones(len(y))),
    "a mean and a penalty": lambda y, p: MEAN(y, p) + 1e-3 * jnp.sum(p**2),
    "two means": lambda y, p: MEAN(y, p) + MEAN_OF_DISTANCES(y, p),
    "a weighted mean": keras.losses.MeanSquaredError("mean_with_sample_weight"),
}
RIGHT = {
    "the mean of means": lambda x: all_reduce("mean", differentiate(MEAN)(x)),
    "divided losses": (
        lambda x: all_reduce(
            "sum", differentiate(lambda y, p: MEAN(y, p) / NUM_REPLICAS)(x)
        )
    ),
    "scaled losses": (
        lambda x: all_reduce(
            "sum", differentiate(lambda y, p: MEAN(y, p) * (1 / NUM_REPLICAS))(x)
        )
    ),
    "a scaled loss": (
        lambda x: all_reduce(
            "sum",
            differentiate(lambda y, p: armillary.scale_regularization_loss(MEAN(y, p)))(
                x
            ),
        )
    ),
    "divided gradients": lambda x: all_reduce("sum", scaled(differentiate(MEAN)(x))),
    "scaled gradients": (
        lambda x: all_reduce("sum", differentiate(MEAN)(x) * (1 / NUM_REPLICAS))
    ),
    "a divided sum": lambda x: scaled(all_reduce("sum", differentiate(MEAN)(x))),
    "a scaled sum": (
        lambda x: all_reduce("sum", differentiate(MEAN)(x)) * (1 / NUM_REPLICAS)
    ),
    "JAX's own mean": (
        lambda x: jax.lax.psum(differentiate(MEAN)(x), "replica") / NUM_REPLICAS
    ),
    "losses of examples": (
        lambda x: all_reduce(
            "sum",
            differentiate(
                lambda y, p: compute_average_loss(
                    keras.losses.MeanSquaredError(reduction=None)(y, p)
                )
            )(x),
        )
    ),
    "a sum of losses": (
        lambda x: all_reduce(
            "sum",
            differentiate(lambda y, p: SUM(y, p) / 16)(x),
        )
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_the_sum_of_means_is_an_error(name):
    message = (
        r"sum over replicas at .*test_losses_in_steps.* Keras has averaged .*"
        r'4 times too large.*all_reduce\("mean", gradients\).*`reduction=None`'
    )
    with pytest.raises(DoubleReductionError, match=message):
        run(lambda x: all_reduce("sum", differentiate(MISTAKES[name])(x)))


@pytest.mark.parametrize("name", RIGHT)
def test_a_correct_reduction_is_no_error(name):
    np.testing.assert_allclose(run(RIGHT[name]).array, EXPECTED, rtol=1e-5)


@pytest.mark.parametrize(
    "copy",
    [
        jax.lax.optimization_barrier,
        jax.lax.stop_gradient,
        lambda gradient: -gradient,
        lambda gradient: 0.0 - gradient,
        lambda gradient: gradient.reshape(1, -1).T,
    ],
    ids=["barrier", "constant", "negative", "difference", "transposed"],
)
def test_a_copy_of_a_gradient_of_a_mean_is_still_one(copy):
    with pytest.raises(DoubleReductionError, match="Keras has averaged"):
        run(lambda x: all_reduce("sum", copy(differentiate(MEAN)(x))))


def test_gradients_of_keras_models_are_seen_as_well(keras):
    model = keras.Sequential([keras.layers.Input((1,)), keras.layers.Dense(1)])

    def gradients_of(batch):
        def loss_fn():
            return MEAN(batch, model(batch))

        return armillary.value_and_grad(loss_fn, model.trainable_variables)[1]

    run(lambda batch: all_reduce("mean", gradients_of(batch)))
    with pytest.raises(DoubleReductionError, match="Keras has averaged"):
        run(lambda batch: all_reduce("sum", gradients_of(batch)))


def test_gradients_of_modules_are_seen_as_well():
    model = nnx.Linear(1, 1, rngs=nnx.Rngs(0))

    def gradients_of(batch):
        return nnx.grad(lambda model: MEAN(batch, model(batch)))(model)

    run(lambda batch: all_reduce("mean", gradients_of(batch)))
    with pytest.raises(DoubleReductionError, match="Keras has averaged"):
        run(lambda batch: all_reduce("sum", gradients_of(batch)))
