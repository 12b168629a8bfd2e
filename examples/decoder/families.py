"""Llama, Qwen2 and Gemma: the table of names, and the sizes in `config.json`.

    config = read_config("llama")
    model = strategy.make(lambda: Decoder(config, nnx.Rngs(0)))
    pretrained.load(model, "llama", make_names(config), cast=True)

The folder is a model of Hugging Face, with `config.json` and files of safetensors.
"""

import json
from pathlib import Path
from typing import Any

from armillary import pretrained
from decoder.model import ACTIVATIONS, DecoderConfig, RotaryScaling

# From the names of a layer in the file to the names of a block.
KERNELS = {
    "self_attn.q_proj": "attention/query",
    "self_attn.k_proj": "attention/key",
    "self_attn.v_proj": "attention/value",
    "self_attn.o_proj": "attention/output",
    "mlp.gate_proj": "gate",
    "mlp.up_proj": "up",
    "mlp.down_proj": "down",
}
BIASES = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
NORMS = {
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "mlp_norm",
}


def make_names(config: DecoderConfig) -> pretrained.Names:
    """Returns the table of names. The three families have the same names."""
    layer = "model.layers.{layer}"
    rows: list[tuple[Any, ...]] = [
        ("model.embed_tokens.weight", "embed/embedding"),
        ("model.norm.weight", "norm/scale"),
        # Older files hold what the model computes by itself.
        (layer + ".self_attn.rotary_emb.inv_freq", None),
    ]
    for name, path in KERNELS.items():
        weight = f"{layer}.{name}.weight"
        rows.append((weight, f"blocks/{path}/kernel", pretrained.transpose))
    for name, path in NORMS.items():
        rows.append((f"{layer}.{name}.weight", f"blocks/{path}/scale"))
    if config.has_qkv_bias:
        for name in BIASES:
            rows.append((f"{layer}.{name}.bias", f"blocks/{KERNELS[name]}/bias"))
    if config.is_tied:
        rows.append(("lm_head.weight", "embed/embedding", pretrained.tied))
    else:
        rows.append(("lm_head.weight", "head/kernel", pretrained.transpose))
    return pretrained.Names(rows)


def read_config(folder: str | Path) -> DecoderConfig:
    """Returns the size of the model in a folder.

    Raises:
        ValueError: If the model is of another family, or needs what is not here.
    """
    path = Path(folder) / "config.json"
    found = json.loads(path.read_text())
    family = found["model_type"]
    if family not in ("llama", "qwen2", "gemma"):
        raise ValueError(
            f"{path} describes a model of type {family!r}, but this example has llama, "
            "qwen2 and gemma. Gemma 2 and later have more norms."
        )
    is_gemma = family == "gemma"
    activation = found.get("hidden_act", "silu")
    # Gemma was published with the name of another GELU.
    if is_gemma:
        activation = "gelu_pytorch_tanh"
    rotary = find_rotary(found)
    refuse_others(path, found, activation, rotary)

    hidden_size = found["hidden_size"]
    num_heads = found["num_attention_heads"]
    return DecoderConfig(
        vocabulary_size=found["vocab_size"],
        hidden_size=hidden_size,
        mlp_size=found["intermediate_size"],
        num_layers=found["num_hidden_layers"],
        num_heads=num_heads,
        num_kv_heads=found.get("num_key_value_heads") or num_heads,
        head_size=found.get("head_dim") or hidden_size // num_heads,
        norm_epsilon=found["rms_norm_eps"],
        rotary_base=rotary["rope_theta"],
        rotary_scaling=make_scaling(rotary),
        activation=activation,
        has_qkv_bias=family == "qwen2",
        norm_offset=1.0 if is_gemma else 0.0,
        embedding_scale=hidden_size**0.5 if is_gemma else 1.0,
        is_tied=found.get("tie_word_embeddings", is_gemma),
    )


def find_rotary(found: dict[str, Any]) -> dict[str, Any]:
    """Returns the values of the rotary positions, from newer or older files."""
    old = {"rope_theta": found.get("rope_theta", 10_000.0)}
    return old | (found.get("rope_parameters") or found.get("rope_scaling") or {})


def make_scaling(rotary: dict[str, Any]) -> RotaryScaling | None:
    """Returns the scaling of Llama 3.1, if the file has it."""
    if rotary.get("rope_type", "default") == "default":
        return None
    return RotaryScaling(
        factor=rotary["factor"],
        low_frequency=rotary["low_freq_factor"],
        high_frequency=rotary["high_freq_factor"],
        num_positions=rotary["original_max_position_embeddings"],
    )


def refuse_others(
    path: Path, found: dict[str, Any], activation: str, rotary: dict[str, Any]
) -> None:
    """Raises if the model has a part that this one does not compute."""
    rotary_type = rotary.get("rope_type", rotary.get("type", "default"))
    problems = {
        f"hidden_act={activation!r}": activation not in ACTIVATIONS,
        f"rope_type={rotary_type!r}": rotary_type not in ("default", "llama3"),
        "attention_bias=true": found.get("attention_bias", False),
        "mlp_bias=true": found.get("mlp_bias", False),
        "use_sliding_window=true": found.get("use_sliding_window", False),
    }
    wrong = [name for name, is_wrong in problems.items() if is_wrong]
    if wrong:
        raise ValueError(
            f"{path} has {', '.join(wrong)}, which `decoder.model` does not compute. "
            "Use another model, or add it there."
        )
