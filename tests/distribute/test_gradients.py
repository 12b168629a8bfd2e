"""Gradients of mirrored parameters are those of the global batch."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import armillary

FEATURES = np.random.default_rng(0).normal(size=(16, 3)).astype(np.float32)
TARGETS = FEATURES @ np.asarray([[1.0], [-2.0], [0.5]], np.float32)


def make_model() -> nnx.Linear:
    return nnx.Linear(3, 1, rngs=nnx.Rngs(0))


def per_example(model, batch):
    return jnp.mean((model(batch["x"]) - batch["y"]) ** 2, axis=-1)


def average_loss(model, batch, strategy):
    del strategy
    return armillary.compute_average_loss(per_example(model, batch))


def scaled_loss(model, batch, strategy):
    return jnp.mean(per_example(model, batch)) / strategy.num_replicas_in_sync


@pytest.fixture
def batches():
    def batches(strategy, size=16):
        arrays = {"x": FEATURES[:size], "y": TARGETS[:size]}
        return strategy.distribute_dataset([arrays])

    return batches


@pytest.mark.slow
@pytest.mark.parametrize("loss", [average_loss, scaled_loss])
@pytest.mark.parametrize("num_replicas", [1, 2, 4, 8])
def test_gradients_equal_those_of_one_device(
    num_replicas, loss, make_mirrored, batches
):
    strategy, model = make_mirrored(num_replicas), make_model()
    (batch,) = batches(strategy)

    def step_fn(batch):
        return armillary.all_reduce(
            "sum", nnx.grad(lambda model: loss(model, batch, strategy))(model)
        )

    results = strategy.local_results(strategy.run(step_fn, args=(batch,)))
    expected = armillary.all_reduce(
        "sum",
        nnx.grad(
            lambda model: jnp.mean(per_example(model, {"x": FEATURES, "y": TARGETS}))
        )(model),
    )
    for grads in results:
        for name in ("kernel", "bias"):
            np.testing.assert_allclose(
                grads[name][...], expected[name][...], rtol=1e-6, atol=1e-6
            )


def test_a_regularization_loss_counts_once(make_mirrored, batches):
    strategy, model = make_mirrored(4), make_model()
    (batch,) = batches(strategy)

    def step_fn(batch):
        def loss_fn(model):
            penalty = model.kernel[...] ** 2
            return armillary.scale_regularization_loss(penalty) + 0 * jnp.sum(
                model(batch["x"])
            )

        return armillary.all_reduce("sum", nnx.grad(loss_fn)(model))

    grads = strategy.local_results(strategy.run(step_fn, args=(batch,)))[0]
    np.testing.assert_allclose(grads["kernel"][...], 2 * model.kernel[...], rtol=1e-6)


def test_plain_parameters_in_an_attribute_are_mirrored(make_mirrored, batches):
    strategy = make_mirrored(4)
    (batch,) = batches(strategy)

    class Trainer:
        params = None

    trainer = Trainer()
    trainer.params = {"w": jnp.zeros((3, 1))}

    def step_fn(batch):
        def loss_fn(params):
            errors = (batch["x"] @ params["w"] - batch["y"])[:, 0]
            return armillary.compute_average_loss(errors**2)

        grads = armillary.all_reduce("sum", jax.grad(loss_fn)(trainer.params))
        trainer.params = jax.tree.map(lambda p, g: p - g, trainer.params, grads)

    strategy.run(step_fn, args=(batch,))
    expected = 2 * FEATURES.T @ TARGETS / 16
    np.testing.assert_allclose(trainer.params["w"], expected, rtol=1e-5)
