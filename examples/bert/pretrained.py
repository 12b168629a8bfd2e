"""Puts a pretrained BERT into the model of `bert.model`.

Files of safetensors are read, with the names of Hugging Face. Here every array has the
name that google-research/bert gave it, such as
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

# What the file may lack: training begins with its own.
HEADS = ("pooler/", "classifier/")
# What the file may have beside what the model has: the positions from 0 to 511.
IGNORED = "/position_ids"

# Of the modules of the model.
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


def load_pretrained(path: Path, model: BertClassifier) -> str:
    """Puts the arrays of a file into a model; nothing changes if they do not fit.

    Args:
        path: A file of safetensors, or a folder with one.
        model: Its embeddings and encoder must have the arrays of the file, all of them
            and no others. Its pooler and classifier may have more than the file.

    Returns:
        What was read, what stays as it was, and what is not used.

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
    """Returns the arrays of a file by name."""
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    if len(files) != 1 or not files[0].is_file() or files[0].suffix != ".safetensors":
        raise FileNotFoundError(
            f"{path} is no file *.safetensors, and no folder with one such file. "
            "Hugging Face has one of each BERT: `model.safetensors`."
        )
    try:
        tensors = load_file(files[0])
    except SafetensorError as error:
        raise ValueError(f"{path} is damaged: {error}. Download it again.") from error
    return dict(from_hugging_face(name, array) for name, array in tensors.items())


def from_hugging_face(name: str, array: np.ndarray) -> tuple[str, np.ndarray]:
    """Returns name and array for those of Hugging Face, old ones or new ones."""
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
    """Returns a sentence that says of which size the model in a file is."""
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
