"""Puts a pretrained BERT into the model of `bert.model`.

Three kinds of files are read: safetensors with the names of Hugging Face, and
checkpoints of TensorFlow, either with the names of google-research/bert or with the
objects of the TensorFlow Model Garden. Here every array has the name that
google-research/bert gave it, without `bert/`, such as
`encoder/layer_0/attention/self/query/kernel`. A kernel has the shape
`(inputs, outputs)`.
"""

import re
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx
from safetensors import SafetensorError
from safetensors.numpy import load_file

from bert.model import PRESETS, BertClassifier
from bert.tensor_bundle import read_tensor_bundle

# A file may lack these layers. Then they start with random values.
HEADS = ("pooler/", "classifier/")
# Arrays that the model does not need: statistics of an optimizer, and the positions
# from 0 to 511.
IGNORED = ("/adam_m", "/adam_v", "/position_ids")

# From the names of this model to the names in the file.
NAMES = {
    "words": "embeddings/word_embeddings",
    "positions": "embeddings/position_embeddings",
    "types": "embeddings/token_type_embeddings",
    "norm": "embeddings/LayerNorm",
    "layers/{}/attention/query": "encoder/layer_{}/attention/self/query",
    "layers/{}/attention/key": "encoder/layer_{}/attention/self/key",
    "layers/{}/attention/value": "encoder/layer_{}/attention/self/value",
    "layers/{}/attention/output": "encoder/layer_{}/attention/output/dense",
    "layers/{}/attention_norm": "encoder/layer_{}/attention/output/LayerNorm",
    "layers/{}/expand": "encoder/layer_{}/intermediate/dense",
    "layers/{}/shrink": "encoder/layer_{}/output/dense",
    "layers/{}/output_norm": "encoder/layer_{}/output/LayerNorm",
    "pooler": "pooler/dense",
    "classifier": "classifier",
}

# Names in a checkpoint of the TensorFlow Model Garden.
LAYER = re.compile(
    r"(\w+/)*layer_with_weights-(?P<number>\d+)/(?P<path>[\w/]+)"
    r"/\.ATTRIBUTES/VARIABLE_VALUE"
)
EMBEDDINGS = [NAMES["words"], NAMES["positions"], NAMES["types"]]
# The objects in a layer of the encoder.
OBJECTS = {
    "_attention_layer/_query_dense": "attention/self/query",
    "_attention_layer/_key_dense": "attention/self/key",
    "_attention_layer/_value_dense": "attention/self/value",
    "_attention_layer/_output_dense": "attention/output/dense",
    "_attention_output_dense": "attention/output/dense",
    "_attention_layer_norm": "attention/output/LayerNorm",
    "_intermediate_dense": "intermediate/dense",
    "_output_dense": "output/dense",
    "_output_layer_norm": "output/LayerNorm",
}


def load_pretrained(path: Path, model: BertClassifier) -> str:
    """Puts the arrays of a file into a model; nothing changes if they do not fit.

    Args:
        path: A file of safetensors, a checkpoint of TensorFlow (such as
            `bert_model.ckpt`, which is several files), or a folder with one of either.
        model: Its embeddings and encoder must have the arrays of the file, all of them
            and no others. Its pooler and classifier may have more than the file.

    Returns:
        A report: the values that were read, left unchanged, and not used.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If the file is damaged, or is of a model of another size.
    """
    arrays = read_arrays(path)
    variables = {
        name_in_file(place): ("/".join(map(str, place)), variable)
        for place, variable in nnx.to_flat_state(nnx.state(model, nnx.Param))
    }
    problems = []
    for name, (place, variable) in variables.items():
        if name not in arrays:
            if not name.startswith(HEADS):
                problems.append(f"- {place}: not in the file, as {name}")
        elif arrays[name].shape != variable.shape:
            problems.append(
                f"~ {place}: {arrays[name].shape} in the file, {variable.shape} in "
                "the model"
            )
    unused = sorted(arrays.keys() - variables.keys())
    problems += [
        f"+ {name}: {arrays[name].shape} in the file, not in the model"
        for name in unused
        if name.startswith(("embeddings/", "encoder/")) and not name.endswith(IGNORED)
    ]
    if problems:
        lines = "  " + shorten(problems, "\n  ")
        raise ValueError(
            f"{path} does not fit the model; {len(problems)} arrays differ:\n{lines}\n"
            f"{find_preset(arrays)} Nothing was read."
        )

    found = [name for name in variables if name in arrays]
    for name in found:
        variable = variables[name][1]
        variable.set_value(jnp.array(arrays[name], variable.dtype))
    left = [place for name, (place, _) in variables.items() if name not in arrays]
    return (
        f"Read {len(found)} arrays of {path}.\n"
        f"Not in the file, left as they were: {', '.join(left) or 'none'}.\n"
        f"In the file, not used: {shorten(unused, ', ') or 'none'}."
    )


def read_arrays(path: Path) -> dict[str, np.ndarray]:
    """Returns the arrays of a file by name, for each kind of file."""
    file = find_file(path)
    if file.suffix == ".index":
        return from_tensorflow(read_tensor_bundle(file.with_suffix("")))
    try:
        tensors = load_file(file)
    except SafetensorError as error:
        raise ValueError(f"{path} is damaged: {error}. Download it again.") from error
    return dict(from_hugging_face(name, array) for name, array in tensors.items())


def find_file(path: Path) -> Path:
    """Returns the file of safetensors, or the index of a checkpoint of TensorFlow."""
    if path.is_dir():
        candidates = [*path.glob("*.safetensors"), *path.glob("*.index")]
    else:
        candidates = [path, Path(f"{path}.index")]

    kinds = (".safetensors", ".index")
    files = [file for file in candidates if file.suffix in kinds and file.is_file()]
    if len(files) != 1:
        raise FileNotFoundError(
            f"{path} is neither a file *.safetensors, nor a checkpoint of TensorFlow, "
            f"nor a folder with one of them: {len(files)} files fit. A checkpoint "
            "consists of `bert_model.ckpt.index` and `bert_model.ckpt.data-...`, and "
            "its path is `bert_model.ckpt`."
        )
    return files[0]


def from_tensorflow(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns the arrays of a checkpoint by the names of google-research/bert."""
    if any("layer_with_weights-" in name for name in tensors):
        return from_objects(tensors)

    arrays = {}
    for name, array in tensors.items():
        if name == "output_weights":
            arrays["classifier/kernel"] = array.T
        elif name == "output_bias":
            arrays["classifier/bias"] = array
        else:
            arrays[name.removeprefix("bert/")] = array
    return arrays


def from_objects(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns the arrays of a checkpoint that the Model Garden wrote, an encoder.

    Its names are paths of objects, such as
    `model/layer_with_weights-4/_attention_layer/_query_dense/kernel`. The layers are
    numbered: three embeddings, a layer norm, the layers of the encoder, and the pooler.
    """
    layers: dict[int, dict[str, np.ndarray]] = {}
    arrays = {}
    for name, array in tensors.items():
        match = LAYER.fullmatch(name)
        if match is None:
            arrays[name] = array
        else:
            layers.setdefault(int(match["number"]), {})[match["path"]] = array

    embeddings = iter(EMBEDDINGS)
    num_encoder_layers = 0
    for _, layer in sorted(layers.items()):
        if "embeddings" in layer:
            module = {"embeddings": next(embeddings, "embeddings/unknown")}
        elif "gamma" in layer:
            module = {leaf: f"embeddings/LayerNorm/{leaf}" for leaf in layer}
        elif "kernel" in layer:
            module = {leaf: f"pooler/dense/{leaf}" for leaf in layer}
        else:
            prefix = f"encoder/layer_{num_encoder_layers}"
            module = {path: f"{prefix}/{rename_in_layer(path)}" for path in layer}
            num_encoder_layers += 1
        for path, name in module.items():
            arrays[name] = without_heads(name, layer[path])
    return arrays


def rename_in_layer(path: str) -> str:
    """Returns the name of an array in a layer, from the names of its objects."""
    module, _, leaf = path.rpartition("/")
    return f"{OBJECTS.get(module, module)}/{leaf}"


def without_heads(name: str, array: np.ndarray) -> np.ndarray:
    """Returns an array of attention with its heads side by side in one axis."""
    if "/attention/self/" in name and name.endswith("/kernel"):
        return array.reshape(array.shape[0], -1)
    if "/attention/self/" in name:
        return array.reshape(-1)
    if name.endswith("/attention/output/dense/kernel"):
        return array.reshape(-1, array.shape[-1])
    return array


def from_hugging_face(name: str, array: np.ndarray) -> tuple[str, np.ndarray]:
    """Returns name and array for a name and array of Hugging Face, old or new."""
    name = re.sub(r"\blayer\.(\d+)", r"layer_\1", name.removeprefix("bert."))
    *module, leaf = name.split(".")
    module = "/".join(module)
    if module.endswith("_embeddings"):
        return module, array
    if module.endswith("/LayerNorm"):
        leaf = {"weight": "gamma", "bias": "beta"}.get(leaf, leaf)
    elif leaf == "weight":
        leaf, array = "kernel", array.T
    return f"{module}/{leaf}", array


def name_in_file(place: tuple[Any, ...]) -> str:
    """Returns the name for a parameter of the model."""
    *module, leaf = place
    number = next((part for part in module if isinstance(part, int)), None)
    pattern = "/".join("{}" if isinstance(part, int) else part for part in module)
    name = NAMES[pattern].format(number)
    if leaf == "embedding":
        return name
    if name.endswith("/LayerNorm"):
        leaf = {"scale": "gamma", "bias": "beta"}[leaf]
    return f"{name}/{leaf}"


def find_preset(arrays: dict[str, np.ndarray]) -> str:
    """Returns a sentence about the size of the model in a file."""
    found = {int(n) for n in re.findall(r"encoder/layer_(\d+)/", " ".join(arrays))}
    words = arrays.get("embeddings/word_embeddings")
    if not found or words is None:
        names = ", ".join(sorted(arrays)[:3])
        return f"It does not look like a BERT: it has {names or 'nothing'}."
    size = (len(found), words.shape[-1])
    presets = (
        name
        for name, config in PRESETS.items()
        if (config.num_layers, config.hidden_size) == size
    )
    preset = next((f"`--preset {name}`" for name in presets), "none of the presets")
    return f"The file has {size[0]} layers of size {size[1]}, which is {preset}."


def shorten(lines: list[str], separator: str, num_shown: int = 8) -> str:
    """Returns the first of many lines, and how many there are more."""
    more = len(lines) - num_shown
    shown = [*lines[:num_shown], f"... and {more} more"] if more > 0 else lines
    return separator.join(shown)
