"""BERT in NumPy, with the array names of google-research/bert."""

from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from scipy.special import erf

Arrays = dict[str, np.ndarray]


def make_arrays(config: Any, seed: int = 0) -> Arrays:
    """Returns random parameters, all of them far from 0 and 1."""
    rng, size = np.random.default_rng(seed), config.hidden_size
    arrays = {}

    def add(name: str, *shape: int) -> None:
        arrays[f"bert/{name}"] = rng.normal(size=shape, scale=0.3).astype("float32")

    def add_dense(name: str, inputs: int, outputs: int) -> None:
        add(f"{name}/kernel", inputs, outputs)
        add(f"{name}/bias", outputs)

    def add_norm(name: str) -> None:
        add(f"{name}/gamma", size)
        add(f"{name}/beta", size)

    add("embeddings/word_embeddings", config.vocabulary_size, size)
    add("embeddings/position_embeddings", config.num_positions, size)
    add("embeddings/token_type_embeddings", config.num_types, size)
    add_norm("embeddings/LayerNorm")
    for number in range(config.num_layers):
        layer = f"encoder/layer_{number}"
        for part in ("self/query", "self/key", "self/value", "output/dense"):
            add_dense(f"{layer}/attention/{part}", size, size)
        add_norm(f"{layer}/attention/output/LayerNorm")
        add_dense(f"{layer}/intermediate/dense", size, 4 * size)
        add_dense(f"{layer}/output/dense", 4 * size, size)
        add_norm(f"{layer}/output/LayerNorm")
    add_dense("pooler/dense", size, size)
    for name, shape in {"output_weights": (2, size), "output_bias": (2,)}.items():
        arrays[name] = rng.normal(size=shape).astype("float32")
    return arrays


def write_model(
    path: Path, arrays: Arrays, prefix: str = "bert.", *, old: bool = False
) -> Path:
    """Writes parameters as PyTorch has them, under the names of Hugging Face."""
    new_names = {} if old else {"gamma": "weight", "beta": "bias"}
    positions = len(arrays["bert/embeddings/position_embeddings"])
    tensors = {
        "classifier.weight": arrays["output_weights"],
        "classifier.bias": arrays["output_bias"],
        "cls.predictions.bias": np.zeros(2, "float32"),
        f"{prefix}embeddings.position_ids": np.arange(positions)[None],
    }
    for name, array in arrays.items():
        if name.startswith("output_"):
            continue
        parts = name.removeprefix("bert/").replace("layer_", "layer/").split("/")
        *module, leaf = parts
        if leaf.endswith("_embeddings"):
            module, leaf = [*module, leaf], "weight"
        elif leaf == "kernel":
            leaf, array = "weight", np.ascontiguousarray(array.T)
        tensors[prefix + ".".join([*module, new_names.get(leaf, leaf)])] = array
    save_file(tensors, path)
    return path


def as_objects(arrays: Arrays, config: Any) -> Arrays:
    """Returns the encoder's arrays by the names that the Model Garden gives them."""
    heads = (config.num_heads, config.hidden_size // config.num_heads)
    layers = [
        {"embeddings": arrays["bert/embeddings/word_embeddings"]},
        {"embeddings": arrays["bert/embeddings/position_embeddings"]},
        {"embeddings": arrays["bert/embeddings/token_type_embeddings"]},
        {
            leaf: arrays[f"bert/embeddings/LayerNorm/{leaf}"]
            for leaf in ("gamma", "beta")
        },
    ]
    for number in range(config.num_layers):
        layer, prefix = {}, f"bert/encoder/layer_{number}"
        for part in ("query", "key", "value"):
            dense, name = f"{prefix}/attention/self/{part}", f"_{part}_dense"
            kernel, bias = arrays[f"{dense}/kernel"], arrays[f"{dense}/bias"]
            layer[f"_attention_layer/{name}/kernel"] = kernel.reshape(-1, *heads)
            layer[f"_attention_layer/{name}/bias"] = bias.reshape(heads)
        dense = f"{prefix}/attention/output/dense"
        kernel = arrays[f"{dense}/kernel"].reshape(*heads, -1)
        layer["_attention_layer/_output_dense/kernel"] = kernel
        layer["_attention_layer/_output_dense/bias"] = arrays[f"{dense}/bias"]
        for name, module in {
            "_intermediate_dense": "intermediate/dense",
            "_output_dense": "output/dense",
            "_attention_layer_norm": "attention/output/LayerNorm",
            "_output_layer_norm": "output/LayerNorm",
        }.items():
            leaves = ("kernel", "bias") if name.endswith("dense") else ("gamma", "beta")
            for leaf in leaves:
                layer[f"{name}/{leaf}"] = arrays[f"{prefix}/{module}/{leaf}"]
        layers.append(layer)
    pooler = "bert/pooler/dense"
    layers.append({leaf: arrays[f"{pooler}/{leaf}"] for leaf in ("kernel", "bias")})
    return {
        f"model/layer_with_weights-{number}/{path}/.ATTRIBUTES/VARIABLE_VALUE": array
        for number, layer in enumerate(layers)
        for path, array in layer.items()
    }


def classify(
    arrays: Arrays,
    config: Any,
    input_ids: np.ndarray,
    input_mask: np.ndarray,
    segment_ids: np.ndarray,
) -> np.ndarray:
    """Returns the logits of a batch, one example after another, in 64 bits."""
    p = {name.removeprefix("bert/"): a.astype(float) for name, a in arrays.items()}

    def dense(x: np.ndarray, name: str) -> np.ndarray:
        return x @ p[f"{name}/kernel"] + p[f"{name}/bias"]

    def norm(x: np.ndarray, name: str) -> np.ndarray:
        centered = x - x.mean(axis=1, keepdims=True)
        deviation = np.sqrt((centered**2).mean(axis=1, keepdims=True) + 1e-12)
        return centered / deviation * p[f"{name}/gamma"] + p[f"{name}/beta"]

    def attend(x: np.ndarray, counts: np.ndarray, layer: str) -> np.ndarray:
        parts = ("query", "key", "value")
        heads = (
            np.split(dense(x, f"{layer}/attention/self/{part}"), config.num_heads, 1)
            for part in parts
        )
        outputs = []
        for query, key, value in zip(*heads, strict=True):
            scores = query @ key[counts].T / np.sqrt(query.shape[1])
            weights = np.exp(scores - scores.max(axis=1, keepdims=True))
            weights /= weights.sum(axis=1, keepdims=True)
            outputs.append(weights @ value[counts])
        return dense(np.concatenate(outputs, 1), f"{layer}/attention/output/dense")

    def encode(ids: np.ndarray, mask: np.ndarray, types: np.ndarray) -> np.ndarray:
        x = p["embeddings/word_embeddings"][ids]
        x = x + p["embeddings/position_embeddings"][: len(ids)]
        x = norm(
            x + p["embeddings/token_type_embeddings"][types], "embeddings/LayerNorm"
        )
        for number in range(config.num_layers):
            layer = f"encoder/layer_{number}"
            attended = attend(x, mask.astype(bool), layer)
            x = norm(x + attended, f"{layer}/attention/output/LayerNorm")
            hidden = dense(x, f"{layer}/intermediate/dense")
            hidden = hidden * 0.5 * (1 + erf(hidden / np.sqrt(2)))
            shrunk = dense(hidden, f"{layer}/output/dense")
            x = norm(x + shrunk, f"{layer}/output/LayerNorm")
        pooled = np.tanh(dense(x[:1], "pooler/dense"))[0]
        return p["output_weights"] @ pooled + p["output_bias"]

    rows = zip(input_ids, input_mask, segment_ids, strict=True)
    return np.stack([encode(*row) for row in rows])
