"""Tests that LoRA trains only the adapters, and merges them correctly."""

import re
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx

import armillary
from tests.examples.loading import load_example
from tests.examples.running import read_steps, run_well

lora = load_example("lora")


def make_images(num_images):
    return np.random.default_rng(0).random((num_images, 64), "float32")


def read_base(model):
    layers = (model.first, model.second, model.output)
    arrays = [layer.base_module.kernel[...] for layer in layers]
    arrays += [layer.base_module.bias[...] for layer in layers]
    return [np.array(array) for array in arrays]


@pytest.mark.slow
def test_new_adapters_do_not_change_the_output():
    model = lora.Network(nnx.Rngs(0), width=16)
    images = make_images(5)
    expected = np.array(model(images))
    lora.add_adapters(model, 2, nnx.Rngs(1))
    np.testing.assert_array_equal(model(images), expected)
    # For each layer, two columns in and two rows out.
    assert lora.count(model, nnx.LoRAParam) == 2 * (64 + 16 + 16 + 16 + 16 + 5)


@pytest.mark.slow
def test_training_keeps_the_frozen_weights_bit_for_bit(tmp_path):
    model = lora.Network(nnx.Rngs(0))
    lora.add_adapters(model, 2, nnx.Rngs(1))
    before = read_base(model)
    adapters = [
        np.array(leaf) for leaf in jax.tree.leaves(nnx.state(model, nnx.LoRAParam))
    ]

    data, _ = lora.load_data(first=5)
    strategy = armillary.MirroredStrategy(jax.devices("cpu")[:2])
    lora.train(model, data, nnx.LoRAParam, strategy, tmp_path, 20)

    for expected, found in zip(before, read_base(model), strict=True):
        np.testing.assert_array_equal(found, expected)
    trained = jax.tree.leaves(nnx.state(model, nnx.LoRAParam))
    changes = [
        np.abs(new - old).max() for new, old in zip(trained, adapters, strict=True)
    ]
    assert min(changes) > 0

    images = make_images(7)
    merged = lora.merge_adapters(model)
    assert lora.count(merged, nnx.LoRAParam) == 0
    np.testing.assert_allclose(merged(images), model(images), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_the_program_adapts_continues_and_exports(tmp_path):
    arguments = ("--run-dir", tmp_path, "--devices", 2, "--steps")
    run_well("lora.py", *arguments, 100)
    result = run_well("lora.py", *arguments, 200)
    assert read_steps(result.stderr) == [200, 200]
    assert "Trains 2324 of 27801 parameters" in result.stdout
    before, after = map(float, re.findall(r"Test accuracy ([\d.]+)%", result.stdout))
    assert before < 40.0
    assert after > 85.0

    [path] = re.findall(r"The export is (.*)", result.stdout)
    program = jax.export.deserialize(Path(path).read_bytes())
    _, test_data = lora.load_data(first=5)
    digits = program.call(test_data["image"])["digit"]
    share = np.mean(digits == test_data["label"] + 5)
    assert share == pytest.approx(after / 100, abs=1e-3)
