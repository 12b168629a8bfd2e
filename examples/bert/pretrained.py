"""Puts a pretrained BERT into the model of `bert.model`, and the table of its names.

Three kinds of files are read: safetensors with the names of Hugging Face, and
checkpoints of TensorFlow, either with the names of google-research/bert or with the
objects of the TensorFlow Model Garden. Each has a table of names for
`armillary.pretrained`. To write a model for `transformers`:

    pretrained.save(model, "tuned", make_names())
"""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from armillary import pretrained
from armillary.errors import CheckpointMismatchError
from bert.model import PRESETS, BertClassifier
from bert.tensor_bundle import read_tensor_bundle
from bert.tensorflow_names import from_tensorflow

# A file may lack these layers. Then they start with random values.
HEADS = ("pooler", "classifier")
# Parts of the model. Other arrays of TensorFlow belong to an optimizer, for example.
PARTS = ("embeddings/", "encoder/", "pooler/", "classifier/")
OF_OPTIMIZER = ("/adam_m", "/adam_v")

# From the modules of this model to the names of Hugging Face.
EMBEDDINGS = {
    "words": "embeddings.word_embeddings",
    "positions": "embeddings.position_embeddings",
    "types": "embeddings.token_type_embeddings",
}
NORMS = {
    "norm": "embeddings.LayerNorm",
    "layers/{layer}/attention_norm": "encoder.layer.{layer}.attention.output.LayerNorm",
    "layers/{layer}/output_norm": "encoder.layer.{layer}.output.LayerNorm",
}
DENSE = {
    "layers/{layer}/attention/query": "encoder.layer.{layer}.attention.self.query",
    "layers/{layer}/attention/key": "encoder.layer.{layer}.attention.self.key",
    "layers/{layer}/attention/value": "encoder.layer.{layer}.attention.self.value",
    "layers/{layer}/attention/output": "encoder.layer.{layer}.attention.output.dense",
    "layers/{layer}/expand": "encoder.layer.{layer}.intermediate.dense",
    "layers/{layer}/shrink": "encoder.layer.{layer}.output.dense",
    "pooler": "pooler.dense",
}


def make_names(prefix: str = "bert.", *, is_old: bool = False) -> pretrained.Names:
    """Returns the table for files of Hugging Face.

    Args:
        prefix: The beginning of names of the encoder: `"bert."`, or empty in a file
            that holds the encoder alone.
        is_old: Whether the norms have a `gamma` and a `beta`, as in old files.
    """
    scale, shift = ("gamma", "beta") if is_old else ("weight", "bias")
    rows: list[tuple[Any, ...]] = []
    for path, name in EMBEDDINGS.items():
        rows.append((f"{prefix}{name}.weight", f"{path}/embedding"))
    for path, name in NORMS.items():
        rows.append((f"{prefix}{name}.{scale}", f"{path}/scale"))
        rows.append((f"{prefix}{name}.{shift}", f"{path}/bias"))
    dense = {path: f"{prefix}{name}" for path, name in DENSE.items()}
    for path, name in {**dense, "classifier": "classifier"}.items():
        rows.append((f"{name}.weight", f"{path}/kernel", pretrained.transpose))
        rows.append((f"{name}.bias", f"{path}/bias"))
    # The positions from 0 to 511, and the head for masked words.
    rows += [("*embeddings.position_ids", None), ("cls.*", None)]
    return pretrained.Names(rows)


def make_tensorflow_names() -> pretrained.Names:
    """Returns the table for the names of google-research/bert, without `bert/`."""

    def rename(name: str) -> str:
        return name.replace("layer.{layer}", "layer_{layer}").replace(".", "/")

    rows: list[tuple[Any, ...]] = []
    for path, name in EMBEDDINGS.items():
        rows.append((rename(name), f"{path}/embedding"))
    for path, name in NORMS.items():
        rows.append((f"{rename(name)}/gamma", f"{path}/scale"))
        rows.append((f"{rename(name)}/beta", f"{path}/bias"))
    for path, name in {**DENSE, "classifier": "classifier"}.items():
        for leaf in ("kernel", "bias"):
            rows.append((f"{rename(name)}/{leaf}", f"{path}/{leaf}"))
    return pretrained.Names(rows)


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
        CheckpointDamageError: If the file is damaged.
        ValueError: If the file is of a model of another size.
    """
    file = find_file(path)
    unused: list[str] = []
    source: Any = file
    if file.suffix == ".index":
        arrays = from_tensorflow(read_tensor_bundle(file.with_suffix("")))
        source = {
            name: array
            for name, array in arrays.items()
            if name.startswith(PARTS) and not name.endswith(OF_OPTIMIZER)
        }
        unused = sorted(arrays.keys() - source.keys())
        found = list(source)
        names = make_tensorflow_names()
    else:
        found = list(pretrained.list_tensors(file))
        prefix = "bert." if any(name.startswith("bert.") for name in found) else ""
        is_old = any(name.endswith(".gamma") for name in found)
        names = make_names(prefix, is_old=is_old)

    missing = [head for head in HEADS if not any(head in name for name in found)]
    try:
        report = pretrained.load(model, source, names, cast=True, may_differ=missing)
    except CheckpointMismatchError as error:
        raise ValueError(
            f"{path} does not fit the model. {error}\n{find_preset(found, source)}"
        ) from error
    unused += report.unused
    return (
        f"Read {len(report.restored)} arrays of {path}.\n"
        f"Not in the file, left as they were: {', '.join(report.kept) or 'none'}.\n"
        f"In the file, not used: {shorten(unused)}."
    )


def find_file(path: Path) -> Path:
    """Returns the file of safetensors, or the index of a checkpoint of TensorFlow."""
    if path.is_dir():
        candidates = [*path.glob("*.safetensors.index.json")]
        candidates = candidates or [*path.glob("*.safetensors"), *path.glob("*.index")]
    else:
        candidates = [path, Path(f"{path}.index")]

    kinds = (".safetensors", ".index", ".json")
    files = [file for file in candidates if file.suffix in kinds and file.is_file()]
    if len(files) != 1:
        raise FileNotFoundError(
            f"{path} is neither a file *.safetensors, nor a checkpoint of TensorFlow, "
            f"nor a folder with one of them: {len(files)} files fit. A checkpoint "
            "consists of `bert_model.ckpt.index` and `bert_model.ckpt.data-...`, and "
            "its path is `bert_model.ckpt`."
        )
    return files[0]


def find_preset(names: Iterable[str], source: Any) -> str:
    """Returns a sentence about the size of the model in a file."""
    layers = {int(n) for n in re.findall(r"encoder.layer.(\d+)", " ".join(names))}
    tensors = source if isinstance(source, dict) else pretrained.list_tensors(source)
    words = [tensors[name] for name in names if "word_embeddings" in name]
    if not layers or not words:
        shown = ", ".join(sorted(names)[:3])
        return f"It does not look like a BERT: it has {shown or 'nothing'}."
    size = (len(layers), words[0].shape[-1])
    presets = (
        name
        for name, config in PRESETS.items()
        if (config.num_layers, config.hidden_size) == size
    )
    preset = next((f"`--preset {name}`" for name in presets), "none of the presets")
    return f"The file has {size[0]} layers of size {size[1]}, which is {preset}."


def shorten(names: list[str], num_shown: int = 8) -> str:
    """Returns the first of many names, and how many there are more."""
    more = len(names) - num_shown
    shown = [*names[:num_shown], f"... and {more} more"] if more > 0 else names
    return ", ".join(shown) or "none"
