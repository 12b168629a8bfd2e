"""Tests against models that `transformers` makes, where it is installed."""

import jax
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file

import armillary
from armillary import pretrained
from tests.examples.loading import load_example
from tests.examples.running import run_well

pytestmark = pytest.mark.slow

decoder = load_example("decoder.model")
families = load_example("decoder.families")
bert = load_example("bert.model")
bert_pretrained = load_example("bert.pretrained")
RULES = {"embed": "fsdp", "heads": "tensor", "kv_heads": "tensor", "mlp": "tensor"}
RULES |= {"tokens": None, "blocks": None}
SIZES = {
    "vocab_size": 48,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "initializer_range": 0.3,
}
GROUPED = {**SIZES, "num_key_value_heads": 2}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
MODELS = {
    "llama": ("Llama", GROUPED),
    "llama 3": (
        "Llama",
        {**GROUPED, "rope_parameters": LLAMA3, "tie_word_embeddings": True},
    ),
    "qwen2": ("Qwen2", GROUPED),
    "gemma": ("Gemma", {**GROUPED, "head_dim": 12}),
}
TOKENS = np.random.default_rng(0).integers(0, 48, (2, 20))


@pytest.fixture(scope="module")
def transformers():
    pytest.importorskip("torch")
    return pytest.importorskip("transformers")


def make_pretrained(transformers, folder, kind, sizes):
    """Writes a random model, whose norms and biases are random as well."""
    torch = pytest.importorskip("torch")

    torch.manual_seed(0)
    config = getattr(transformers, f"{kind.partition('For')[0]}Config")(**sizes)
    name = kind if "For" in kind else f"{kind}ForCausalLM"
    model = getattr(transformers, name)(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder, max_shard_size="20KB")
    return model


def compute(model, *arguments, **options):
    """Returns the logits of a model of PyTorch."""
    torch = pytest.importorskip("torch")

    with torch.no_grad():
        tensors = [torch.tensor(x) for x in arguments]
        named = {name: torch.tensor(x) for name, x in options.items()}
        return model(*tensors, **named).logits.numpy()


def read_files(folder):
    found = {}
    for path in folder.glob("*.safetensors"):
        found |= load_file(path)
    return found


@pytest.mark.parametrize("num_devices", [1, 4])
@pytest.mark.parametrize("name", MODELS)
def test_a_decoder_gives_the_same_logits_and_goes_back(
    transformers, tmp_path, name, num_devices
):
    kind, sizes = MODELS[name]
    theirs = make_pretrained(transformers, tmp_path / "theirs", kind, sizes)
    expected = compute(theirs, TOKENS)
    config = families.read_config(tmp_path / "theirs")
    strategy = armillary.ShardedStrategy(
        {"fsdp": num_devices // 2 or 1, "tensor": min(num_devices, 2)},
        logical_rules=RULES,
        devices=jax.devices()[:num_devices],
    )
    model = strategy.make(lambda: decoder.Decoder(config, nnx.Rngs(0)))
    names = families.make_names(config)
    pretrained.load(model, tmp_path / "theirs", names)
    logits = nnx.jit(lambda model, tokens: model(tokens))(model, TOKENS)
    assert np.abs(expected).max() > 0.5
    scale = np.abs(expected).max()
    np.testing.assert_allclose(logits, expected, rtol=1e-5, atol=1e-5 * scale)

    # And back, in files of another size.
    mine = tmp_path / "mine"
    pretrained.save(model, mine, names, max_file_bytes=30_000)
    saved = read_files(mine)
    written = read_files(tmp_path / "theirs")
    assert saved.keys() == written.keys()
    for tensor, value in written.items():
        assert saved[tensor].tobytes() == value.tobytes(), tensor
    (mine / "config.json").write_text((tmp_path / "theirs/config.json").read_text())
    again = transformers.AutoModelForCausalLM.from_pretrained(mine).eval()
    np.testing.assert_array_equal(compute(again, TOKENS), expected)


def test_bfloat16_goes_both_ways(transformers, tmp_path):
    theirs = make_pretrained(transformers, tmp_path / "theirs", "Llama", GROUPED)
    theirs.bfloat16().save_pretrained(tmp_path / "half")
    config = families.read_config(tmp_path / "half")
    strategy = armillary.OneDeviceStrategy(jax.devices()[0])
    model = strategy.make(lambda: decoder.Decoder(config, nnx.Rngs(0)))
    names = families.make_names(config)
    pretrained.load(model, tmp_path / "half", names, cast=True)
    assert model.head.kernel.dtype == np.float32
    pretrained.save(model, tmp_path / "mine", names, dtype="bfloat16")
    written = read_files(tmp_path / "half")
    for tensor, value in read_files(tmp_path / "mine").items():
        np.testing.assert_array_equal(value, written[tensor], strict=True)


@pytest.mark.parametrize("kind", ["BertModel", "BertForSequenceClassification"])
def test_bert_gives_the_same_logits_and_goes_back(transformers, tmp_path, kind):
    sizes = {**SIZES, "intermediate_size": 128, "max_position_embeddings": 24}
    theirs = make_pretrained(
        transformers, tmp_path / "theirs", "BertForSequenceClassification", sizes
    )
    if kind == "BertModel":
        theirs.bert.save_pretrained(tmp_path / "encoder")
    config = bert.BertConfig(
        num_layers=3,
        hidden_size=32,
        num_heads=4,
        vocabulary_size=48,
        num_positions=24,
    )
    model = bert.BertClassifier(config, nnx.Rngs(0))
    folder = tmp_path / ("encoder" if kind == "BertModel" else "theirs")
    report = bert_pretrained.load_pretrained(folder, model)
    if kind == "BertModel":
        assert "left as they were: classifier/bias, classifier/kernel." in report
        return

    mask = (np.arange(20) < np.array([[20], [13]])).astype(np.int32)
    types = (np.arange(20) >= np.array([[9], [5]])).astype(np.int32)
    expected = compute(
        theirs, input_ids=TOKENS, attention_mask=mask, token_type_ids=types
    )
    model.eval()
    logits = nnx.jit(lambda model, *batch: model(*batch))(model, TOKENS, mask, types)
    np.testing.assert_allclose(logits, expected, atol=1e-5)

    names = bert_pretrained.make_names("bert.")
    pretrained.save(model, tmp_path / "mine", names)
    saved = read_files(tmp_path / "mine")
    written = read_files(tmp_path / "theirs")
    assert saved.keys() == written.keys()
    for tensor, value in written.items():
        assert saved[tensor].tobytes() == value.tobytes(), tensor
    theirs.config.save_pretrained(tmp_path / "mine")
    again = type(theirs).from_pretrained(tmp_path / "mine").eval()
    found = compute(again, input_ids=TOKENS, attention_mask=mask, token_type_ids=types)
    np.testing.assert_array_equal(found, expected)


def test_a_llama_with_merged_adapters_is_read_by_transformers(transformers, tmp_path):
    torch = pytest.importorskip("torch")
    options = ("--model", tmp_path / "llama", "--run-dir", tmp_path / "run")
    run_well("llama_lora.py", *options, "--steps", 20)

    merged = tmp_path / "run" / "merged"
    theirs = transformers.LlamaForCausalLM.from_pretrained(merged)
    with torch.no_grad():
        expected = theirs(torch.tensor(TOKENS)).logits.numpy()

    config = families.read_config(merged)
    strategy = armillary.OneDeviceStrategy("cpu:0")
    ours = strategy.make(lambda: decoder.Decoder(config, nnx.Rngs(1)))
    pretrained.load(ours, merged, families.make_names(config))
    np.testing.assert_allclose(
        ours(TOKENS), expected, rtol=1e-5, atol=1e-5 * np.abs(expected).max()
    )
