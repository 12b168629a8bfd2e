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


def read_adapters(model):
    return [np.array(x) for x in jax.tree.leaves(nnx.state(model, nnx.LoRAParam))]


@pytest.mark.slow
def test_training_keeps_the_frozen_weights_bit_for_bit(tmp_path):
    model = lora.Network(nnx.Rngs(0))
    armillary.lora.add(model, rank=2, where="kernel", rngs=nnx.Rngs(1))
    base = armillary.lora.base(model)
    before = [np.array(variable) for variable in base]
    adapters = read_adapters(model)
    # For each layer, two columns in and two rows out.
    assert lora.count(model, nnx.LoRAParam) == 2 * (64 + 128 + 128 + 128 + 128 + 5)

    data, _ = lora.load_data(first=5)
    strategy = armillary.MirroredStrategy(jax.devices("cpu")[:2])
    lora.train(
        model,
        data,
        wrt=nnx.LoRAParam,
        strategy=strategy,
        folder=tmp_path,
        num_steps=20,
        leave_out=base,
    )

    for expected, found in zip(before, base, strict=True):
        np.testing.assert_array_equal(found, expected)
    pairs = zip(read_adapters(model), adapters, strict=True)
    assert min(np.abs(new - old).max() for new, old in pairs) > 0


@pytest.mark.slow
def test_the_program_adapts_continues_and_exports(tmp_path):
    arguments = ("--run-dir", tmp_path, "--devices", 2, "--steps")
    run_well("lora.py", *arguments, 100)
    result = run_well("lora.py", *arguments, 200)
    assert read_steps(result.stderr) == [200]  # The base is restored.
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
