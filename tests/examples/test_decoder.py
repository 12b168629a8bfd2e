"""Tests of the decoder example against equations in NumPy."""

import json
import re

import jax
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file

import armillary
from armillary import pretrained
from tests.examples.decoder_reference import (
    GEMMA,
    LLAMA,
    LLAMA3,
    QWEN2,
    compute_logits,
    make_arrays,
    write_model,
)
from tests.examples.loading import load_example
from tests.tiers import slow_after_first

decoder = load_example("decoder.model")
families = load_example("decoder.families")
TOKENS = np.random.default_rng(1).integers(0, 40, (2, 12))
RULES = {"embed": "fsdp", "heads": "tensor", "kv_heads": "tensor", "mlp": "tensor"}
RULES |= {"tokens": None, "blocks": None}


def load(folder, strategy):
    config = families.read_config(folder)
    model = strategy.make(lambda: decoder.Decoder(config, nnx.Rngs(0)))
    names = families.make_names(config)
    pretrained.load(model, folder, names)
    return model, names


@slow_after_first(
    ("config", "num_devices"),
    [(LLAMA, 1), (QWEN2, 1), (GEMMA, 1), (LLAMA3, 1), (LLAMA, 4), (GEMMA, 4)],
)
def test_logits_equal_the_equations_and_the_file_comes_back(
    config, num_devices, tmp_path
):
    arrays = make_arrays(config)
    write_model(tmp_path, config, arrays)
    strategy = armillary.ShardedStrategy(
        {"fsdp": num_devices // 2 or 1, "tensor": min(num_devices, 2)},
        logical_rules=RULES,
        devices=jax.devices()[:num_devices],
    )
    model, names = load(tmp_path, strategy)
    kernel = model.blocks.attention.query.kernel[...]
    assert kernel.is_fully_replicated == (num_devices == 1)
    logits = nnx.jit(lambda model, tokens: model(tokens))(model, TOKENS)
    expected = compute_logits(config, arrays, TOKENS)
    assert np.abs(expected).max() > 0.5
    np.testing.assert_allclose(logits, expected, atol=2e-5)

    (path,) = pretrained.save(model, tmp_path / "new", names)
    saved = load_file(path)
    assert saved.keys() == arrays.keys()
    for name, value in arrays.items():
        np.testing.assert_array_equal(saved[name], value, err_msg=name)


def test_a_model_of_another_size_lists_what_differs(tmp_path):
    write_model(tmp_path, LLAMA, make_arrays(LLAMA))
    (tmp_path / "config.json").write_text(json.dumps({**QWEN2, "head_dim": 6}))
    config = families.read_config(tmp_path)
    strategy = armillary.OneDeviceStrategy(jax.devices()[0])
    model = strategy.make(lambda: decoder.Decoder(config, nnx.Rngs(0)))
    with pytest.raises(ValueError) as caught:
        pretrained.load(model, tmp_path, families.make_names(config))
    text = str(caught.value)
    assert "7 arrays differ" in text
    assert re.search(r"\+ blocks/attention/key/bias: .* the file lacks 'model", text)
    assert "~ blocks/attention/key/kernel: float32 (3, 16, 8) in the file" in text


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gemma2"}, "of type 'gemma2', but this example has llama"),
        ({"hidden_act": "relu"}, "hidden_act='relu', which `decoder.model` does not"),
        ({"rope_scaling": {"type": "yarn"}}, "rope_type='yarn'"),
        ({"attention_bias": True}, "attention_bias=true"),
    ],
)
def test_a_model_that_is_not_computed_is_refused(changes, message, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, **changes}))
    with pytest.raises(ValueError, match=message):
        families.read_config(tmp_path)
