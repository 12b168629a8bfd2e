"""Tests of the GAN example: the turns of its models, and its measure of quality."""

import jax
import numpy as np
import optax
import pytest
from flax import nnx

import armillary
from tests.examples.loading import load_example

gan = load_example("gan")


def make_models() -> tuple:
    models = gan.Generator(nnx.Rngs(0)), gan.Discriminator(nnx.Rngs(1))
    optimizers = (
        nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param) for model in models
    )
    return models, tuple(optimizers)


def test_distance_is_zero_for_one_set_and_grows_with_the_shift():
    rng = np.random.default_rng(0)
    images = rng.normal(size=(500, 6)) @ rng.normal(size=(6, 6))
    assert gan.frechet_distance(images, images) == pytest.approx(0.0, abs=1e-9)
    shift = np.array([1.0, 0.0, -2.0, 0.0, 0.0, 0.0])
    assert gan.frechet_distance(images, images + shift) == pytest.approx(5.0)
    # Twice as wide: the trace of C + 4 C - 2 sqrt(4 C C) is the trace of C.
    centered = images - images.mean(axis=0)
    expected = np.trace(np.cov(images, rowvar=False))
    assert gan.frechet_distance(centered, 2 * centered) == pytest.approx(expected)


@pytest.mark.slow
def test_each_model_has_its_number_of_turns_in_a_step():
    turns = (1, 2)
    strategy = armillary.MirroredStrategy(jax.devices("cpu")[:2])
    models, optimizers = make_models()
    images = np.random.default_rng(0).random((256, 64), "float32")
    source = armillary.data.from_arrays(images, batch_size=gan.BATCH_SIZE)
    trainer = gan.Trainer(source, strategy, models, optimizers, turns=turns)
    output = trainer.train(2)

    assert trainer.global_step[...] == 2
    assert optimizers[0].step[...] == 2 * turns[0]
    assert optimizers[1].step[...] == 2 * turns[1]
    examples = [2 * gan.BATCH_SIZE * number for number in turns]
    assert trainer.generator_loss.count[...] == examples[0]
    assert trainer.discriminator_loss.count[...] == examples[1]
    assert trainer.accuracy.count[...] == 2 * examples[1]  # real ones and fakes
    assert 0.0 <= float(output["discriminator_accuracy"]) <= 1.0


@pytest.mark.slow
def test_evaluation_compares_every_image_once_and_always_the_same():
    strategy = armillary.MirroredStrategy(jax.devices("cpu")[:4])
    (generator, _), _ = make_models()
    rng = np.random.default_rng(0)
    real = rng.random((70, 64), "float32")
    noise = rng.normal(size=(70, gan.NOISE_SIZE)).astype("float32")
    source = armillary.data.from_arrays({"real": real, "noise": noise}, batch_size=32)
    evaluator = gan.Evaluator(source, strategy, generator)
    fake = np.asarray(generator(noise))
    expected = gan.frechet_distance(real, fake)
    for _ in range(2):
        assert evaluator.evaluate(-1)["distance"] == pytest.approx(expected, rel=1e-4)
