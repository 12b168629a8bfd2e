"""Loading a pretrained BERT: from two kinds of files, and what does not fit."""

import dataclasses
import re
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import save_file

from tests.examples.bert_reference import make_arrays
from tests.examples.bundle_writer import write_bundle
from tests.examples.loading import load_example

bert = load_example("bert.model")
pretrained = load_example("bert.pretrained")

CONFIG = bert.BertConfig(
    num_layers=2, hidden_size=8, num_heads=2, vocabulary_size=20, num_positions=6
)
ARRAYS = make_arrays(CONFIG)
HEADS = ("bert/pooler/", "output_")


def make_model(**changes: int) -> nnx.Module:
    """Returns a model of zeros, without the time that random numbers take."""
    config = dataclasses.replace(CONFIG, **changes)
    model = nnx.eval_shape(lambda: bert.BertClassifier(config, nnx.Rngs(0)))
    state = nnx.state(model, nnx.Param)
    nnx.update(model, jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), state))
    return model


def read_parameters(model: nnx.Module) -> dict[str, np.ndarray]:
    state = nnx.to_flat_state(nnx.state(model, nnx.Param))
    return {"/".join(map(str, path)): np.asarray(x) for path, x in state}


def as_hugging_face(prefix: str = "bert.", *, old: bool = False) -> dict:
    """Returns the arrays as PyTorch has them, under the names of Hugging Face."""
    new_names = {} if old else {"gamma": "weight", "beta": "bias"}
    tensors = {
        "classifier.weight": ARRAYS["output_weights"],
        "classifier.bias": ARRAYS["output_bias"],
        "cls.predictions.bias": np.zeros(CONFIG.vocabulary_size, "float32"),
        f"{prefix}embeddings.position_ids": np.arange(CONFIG.num_positions)[None],
    }
    for name, array in ARRAYS.items():
        if name.startswith("output_"):
            continue
        *module, leaf = (
            name.removeprefix("bert/").replace("layer_", "layer/").split("/")
        )
        if leaf.endswith("_embeddings"):
            module, leaf = [*module, leaf], "weight"
        elif leaf == "kernel":
            leaf, array = "weight", np.ascontiguousarray(array.T)
        tensors[prefix + ".".join([*module, new_names.get(leaf, leaf)])] = array
    return tensors


def write_tensorflow(path: Path, arrays: dict[str, np.ndarray] = ARRAYS) -> Path:
    return write_bundle(path, {**arrays, "global_step": np.int64(7)}, num_shards=2)


@pytest.mark.slow
def test_both_kinds_of_files_give_the_same_arrays(tmp_path):
    checkpoint = write_tensorflow(tmp_path / "bert_model.ckpt")
    files = [checkpoint, tmp_path, tmp_path / "bert_model.ckpt.index"]
    for number, tensors in enumerate(
        [as_hugging_face(), as_hugging_face(""), as_hugging_face(old=True)]
    ):
        folder = tmp_path / str(number)
        folder.mkdir()
        save_file(tensors, folder / "model.safetensors")
        files += [folder / "model.safetensors", folder]
    for file in files:
        model = make_model()
        report = pretrained.load_pretrained(file, model)
        assert report.startswith(f"Read {len(ARRAYS)} arrays of {file}.")
        assert "Not in the file, left as they were: none." in report
        found = read_parameters(model)
        for ours, theirs in {
            "words/embedding": ARRAYS["bert/embeddings/word_embeddings"],
            "norm/scale": ARRAYS["bert/embeddings/LayerNorm/gamma"],
            "layers/1/attention/key/kernel": ARRAYS[
                "bert/encoder/layer_1/attention/self/key/kernel"
            ],
            "layers/1/output_norm/bias": ARRAYS[
                "bert/encoder/layer_1/output/LayerNorm/beta"
            ],
            "classifier/kernel": ARRAYS["output_weights"].T,
        }.items():
            np.testing.assert_array_equal(found[ours], theirs)
        # Each is used, and none twice.
        sums = sorted(array.sum(dtype=float) for array in found.values())
        expected = sorted(array.sum(dtype=float) for array in ARRAYS.values())
        np.testing.assert_array_equal(sums, expected)


def test_report_names_what_is_missing_and_what_is_not_used(tmp_path):
    arrays = {k: v for k, v in ARRAYS.items() if not k.startswith(HEADS)}
    arrays["cls/seq_relationship/output_bias"] = np.zeros(2, "float32")
    slot = "bert/encoder/layer_0/output/dense/bias/adam_m"
    path = write_tensorflow(tmp_path / "model", {**arrays, slot: np.zeros(8)})
    model = make_model()
    report = pretrained.load_pretrained(path, model)
    assert report == (
        f"Read {len(ARRAYS) - 4} arrays of {path}.\n"
        "Not in the file, left as they were: classifier/bias, classifier/kernel, "
        "pooler/bias, pooler/kernel.\n"
        "In the file, not used: cls/seq_relationship/output_bias, "
        "encoder/layer_0/output/dense/bias/adam_m, global_step."
    )
    for name, array in read_parameters(model).items():
        assert array.any() == (not name.startswith(("pooler", "classifier")))


def refuses(path: Path, model: nnx.Module, *parts: str) -> None:
    """Checks the message, and that the model is as it was."""
    pattern = r"(?s)" + ".*".join(map(re.escape, parts))
    with pytest.raises(ValueError, match=pattern):
        pretrained.load_pretrained(path, model)
    assert not any(array.any() for array in read_parameters(model).values())


def test_wrong_shapes_are_listed(tmp_path):
    path = write_tensorflow(tmp_path / "model")
    refuses(
        path,
        make_model(num_positions=4, num_classes=3),
        f"{path} does not fit the model; 3 arrays differ:\n",
        "  ~ classifier/bias: (2,) in the file, (3,) in the model\n",
        "  ~ classifier/kernel: (8, 2) in the file, (8, 3) in the model\n",
        "  ~ positions/embedding: (6, 8) in the file, (4, 8) in the model\n",
        "The file has 2 layers of size 8, which is none of the presets. Nothing was",
    )


@pytest.mark.slow
def test_missing_and_additional_layers_are_listed_shortly(tmp_path):
    path = write_tensorflow(tmp_path / "model")
    refuses(
        path,
        make_model(num_layers=3),
        "16 arrays differ:\n",
        "- layers/2/attention/key/bias: not in the file, as encoder/layer_2/attention/"
        "self/key/bias\n",
        "  ... and 8 more\n",
    )
    refuses(
        path,
        make_model(num_layers=1),
        "16 arrays differ:\n",
        "+ encoder/layer_1/attention/output/LayerNorm/beta: (8,) in the file, not in",
        "  ... and 8 more\n",
    )


@pytest.mark.slow
def test_model_of_another_size_names_its_preset(tmp_path):
    tiny = dataclasses.replace(bert.PRESETS["tiny"], vocabulary_size=9, num_positions=2)
    path = write_bundle(tmp_path / "model", make_arrays(tiny))
    refuses(path, make_model(), "2 layers of size 128, which is `--preset tiny`.")


def test_another_model_is_told_by_its_names(tmp_path):
    path = write_bundle(tmp_path / "model", {"conv/kernel": np.zeros((3, 3))})
    refuses(path, make_model(), "It does not look like a BERT: it has conv/kernel.")


def test_damaged_safetensors_are_named(tmp_path):
    path = tmp_path / "model.safetensors"
    save_file(as_hugging_face(), path)
    path.write_bytes(path.read_bytes()[:-1])
    refuses(path, make_model(), f"{path} is damaged: ", "Download it again.")


@pytest.mark.slow
def test_files_that_are_not_there_are_named(tmp_path):
    with pytest.raises(
        FileNotFoundError, match=r"bert\.ckpt is no file .*bert\.ckpt\.index"
    ):
        pretrained.load_pretrained(tmp_path / "bert.ckpt", make_model())
    with pytest.raises(FileNotFoundError, match="has 0 files with a model"):
        pretrained.load_pretrained(tmp_path, make_model())
