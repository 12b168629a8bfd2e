"""Llama, Qwen2 and Gemma in NumPy, by the names of Hugging Face."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

Arrays = dict[str, np.ndarray]

LLAMA = {
    "model_type": "llama",
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "rope_theta": 10_000.0,
    "tie_word_embeddings": False,
}
QWEN2 = {**LLAMA, "model_type": "qwen2", "rope_theta": 500.0}
GEMMA = {
    **LLAMA,
    "model_type": "gemma",
    "head_dim": 6,
    "hidden_act": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
}
LLAMA3 = {
    **LLAMA,
    "tie_word_embeddings": True,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    },
}


def make_arrays(config: dict[str, Any]) -> Arrays:
    """Returns random tensors, all of them far from 0 and 1."""
    rng = np.random.default_rng(0)
    arrays: Arrays = {}

    def add(name: str, *shape: int) -> None:
        arrays[name] = rng.normal(size=shape, scale=0.3).astype(np.float32)

    size, mlp = config["hidden_size"], config["intermediate_size"]
    heads = config["num_attention_heads"] * config["head_dim"]
    kv_heads = config["num_key_value_heads"] * config["head_dim"]
    add("model.embed_tokens.weight", config["vocab_size"], size)
    for number in range(config["num_hidden_layers"]):
        layer = f"model.layers.{number}"
        for name, outputs in {"q": heads, "k": kv_heads, "v": kv_heads}.items():
            add(f"{layer}.self_attn.{name}_proj.weight", outputs, size)
            if config["model_type"] == "qwen2":
                add(f"{layer}.self_attn.{name}_proj.bias", outputs)
        add(f"{layer}.self_attn.o_proj.weight", size, heads)
        add(f"{layer}.mlp.gate_proj.weight", mlp, size)
        add(f"{layer}.mlp.up_proj.weight", mlp, size)
        add(f"{layer}.mlp.down_proj.weight", size, mlp)
        add(f"{layer}.input_layernorm.weight", size)
        add(f"{layer}.post_attention_layernorm.weight", size)
    add("model.norm.weight", size)
    if not config["tie_word_embeddings"]:
        add("lm_head.weight", config["vocab_size"], size)
    return arrays


def write_model(folder: Path, config: dict[str, Any], arrays: Arrays) -> Path:
    """Writes a folder as Hugging Face has it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(arrays, folder / "model.safetensors", {"format": "pt"})
    return folder


def compute_logits(
    config: dict[str, Any], arrays: Arrays, tokens: np.ndarray
) -> np.ndarray:
    """Returns the logits of a batch, token by token and head by head, in 64 bits."""
    p = {name: array.astype(float) for name, array in arrays.items()}
    is_gemma = config["model_type"] == "gemma"
    head = p.get("lm_head.weight", p["model.embed_tokens.weight"])
    rows = []
    for sequence in tokens:
        x = p["model.embed_tokens.weight"][sequence]
        x = x * np.sqrt(config["hidden_size"]) if is_gemma else x
        for number in range(config["num_hidden_layers"]):
            layer = {
                name.removeprefix(f"model.layers.{number}."): array
                for name, array in p.items()
            }
            x = x + attend(config, layer, norm(config, layer, "input_layernorm", x))
            y = norm(config, layer, "post_attention_layernorm", x)
            gate = y @ layer["mlp.gate_proj.weight"].T
            if is_gemma:
                inner = np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3)
                gate = 0.5 * gate * (1 + np.tanh(inner))
            else:
                gate = gate / (1 + np.exp(-gate))
            up = y @ layer["mlp.up_proj.weight"].T
            x = x + (gate * up) @ layer["mlp.down_proj.weight"].T
        rows.append(norm(config, p, "model.norm", x) @ head.T)
    return np.stack(rows)


def norm(config: dict[str, Any], p: Arrays, name: str, x: np.ndarray) -> np.ndarray:
    offset = 1.0 if config["model_type"] == "gemma" else 0.0
    square = (x**2).mean(axis=1, keepdims=True)
    return x / np.sqrt(square + config["rms_norm_eps"]) * (offset + p[f"{name}.weight"])


def attend(config: dict[str, Any], p: Arrays, x: np.ndarray) -> np.ndarray:
    size = config["head_dim"]
    projected = {}
    for name in "qkv":
        bias = p.get(f"self_attn.{name}_proj.bias", 0.0)
        projected[name] = x @ p[f"self_attn.{name}_proj.weight"].T + bias
    group = config["num_attention_heads"] // config["num_key_value_heads"]
    outputs = []
    for head in range(config["num_attention_heads"]):
        own = slice(head * size, (head + 1) * size)
        shared = slice(head // group * size, (head // group + 1) * size)
        query = turn(config, projected["q"][:, own])
        key = turn(config, projected["k"][:, shared])
        scores = query @ key.T / np.sqrt(size)
        scores[np.triu_indices(len(x), 1)] = -np.inf
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        weights /= weights.sum(axis=1, keepdims=True)
        outputs.append(weights @ projected["v"][:, shared])
    return np.concatenate(outputs, axis=1) @ p["self_attn.o_proj.weight"].T


def turn(config: dict[str, Any], x: np.ndarray) -> np.ndarray:
    """Turns pairs as complex numbers."""
    half = config["head_dim"] // 2
    speeds = config["rope_theta"] ** (-np.arange(half) / half)
    scaling = config.get("rope_scaling")
    for place, speed in enumerate(speeds if scaling else ()):
        turns = scaling["original_max_position_embeddings"] * speed / (2 * np.pi)
        low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
        slow = speed / scaling["factor"]
        if turns < low:
            speeds[place] = slow
        elif turns <= high:
            part = (turns - low) / (high - low)
            speeds[place] = part * speed + (1 - part) * slow
    numbers = x[:, :half] + 1j * x[:, half:]
    numbers = numbers * np.exp(1j * np.arange(len(x))[:, None] * speeds)
    return np.concatenate([numbers.real, numbers.imag], axis=1)
