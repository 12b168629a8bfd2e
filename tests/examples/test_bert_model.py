"""Tests of the BERT model against its equations and against read files."""

import dataclasses
import functools
import re

import jax
import numpy as np
import pytest
from flax import nnx

from armillary.errors import CheckpointDamageError
from tests.examples.bert_reference import (
    as_objects,
    classify,
    make_arrays,
    write_model,
)
from tests.examples.bundle_writer import write_bundle
from tests.examples.loading import load_example
from tests.tiers import slow_after_first

bert = load_example("bert.model")
pretrained = load_example("bert.pretrained")
SMALL = bert.BertConfig(
    num_layers=2, hidden_size=32, num_heads=4, vocabulary_size=50, num_positions=12
)
ARRAYS = make_arrays(SMALL)


def make_model(**changes):
    """Returns a model of zeros, without the time that random numbers take."""
    return nnx.clone(make_zeros(dataclasses.replace(SMALL, **changes)))


@functools.cache
def make_zeros(config):
    model = nnx.eval_shape(lambda: bert.BertClassifier(config, nnx.Rngs(0)))
    state = nnx.state(model, nnx.Param)
    nnx.update(model, jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), state))
    for _, module in nnx.iter_modules(model):
        if isinstance(module, nnx.Dropout):
            module.rngs = nnx.Rngs(0).fork()
    return model


def read_parameters(model):
    return [np.asarray(x) for x in jax.tree.leaves(nnx.state(model, nnx.Param))]


def make_batch(length):
    rng = np.random.default_rng(1)
    lengths = np.array([length, 5, 1])[:, None]
    mask = (np.arange(length) < lengths).astype("int32")
    ids = rng.integers(0, SMALL.vocabulary_size, mask.shape).astype("int32")
    types = (np.arange(length) >= lengths // 2).astype("int32")
    return ids, mask, types


@pytest.mark.slow
def test_logits_from_each_kind_of_file_equal_the_equations(tmp_path):
    model = make_model()
    for number, names in enumerate([("bert.", False), ("", False), ("bert.", True)]):
        path = tmp_path / f"{number}.safetensors"
        other = make_model()
        report = pretrained.load_pretrained(
            write_model(path, ARRAYS, names[0], old=names[1]), other
        )
        assert report.startswith(f"Read {len(ARRAYS)} arrays of {path}.")
        assert "Not in the file, left as they were: none." in report
        unused = ["cls.predictions.bias", f"{names[0]}embeddings.position_ids"]
        assert f"not used: {', '.join(sorted(unused))}." in report
        for one, another in zip(
            read_parameters(model), read_parameters(other), strict=True
        ):
            assert number == 0 or np.array_equal(one, another)
        model = other

    evaluated = nnx.view(model, deterministic=True)
    definition, parameters, others = nnx.split(evaluated, nnx.Param, ...)
    batch = make_batch(length=9)
    logits = jax.jit(lambda p: nnx.merge(definition, p, others)(*batch))(parameters)
    expected = classify(ARRAYS, SMALL, *batch)
    assert np.abs(expected).max() > 1.0
    np.testing.assert_allclose(logits, expected, atol=1e-5)


def read_from(path):
    model = make_model()
    report = pretrained.load_pretrained(path, model)
    return read_parameters(model), report


@pytest.mark.slow
def test_checkpoints_of_tensorflow_give_the_same_arrays_with_both_kinds_of_names(
    tmp_path,
):
    expected, _ = read_from(
        write_model(tmp_path / "model.safetensors", ARRAYS, "bert.")
    )
    encoder = {k: v for k, v in ARRAYS.items() if not k.startswith("output_")}
    slot = "bert/encoder/layer_0/output/dense/bias/adam_m"
    save_counter = "save_counter/.ATTRIBUTES/VARIABLE_VALUE"
    by_name = {**ARRAYS, slot: np.zeros(32), "global_step": np.int64(7)}
    by_object = {**as_objects(ARRAYS, SMALL), save_counter: np.int64(1)}

    for number, arrays in enumerate([by_name, by_object]):
        folder = tmp_path / str(number)
        folder.mkdir()
        prefix = write_bundle(folder / "bert_model.ckpt", arrays, num_shards=2)
        for path in (prefix, folder, folder / "bert_model.ckpt.index"):
            found, report = read_from(path)
            is_whole = number == 0
            count = len(ARRAYS) if is_whole else len(encoder)
            assert report.startswith(f"Read {count} arrays of {path}.")
            left = "none" if is_whole else "classifier/bias, classifier/kernel"
            assert f"left as they were: {left}." in report
            unused = f"{slot[5:]}, global_step" if is_whole else save_counter
            assert f"not used: {unused}." in report
            for one, another in zip(found, expected, strict=True):
                assert np.array_equal(one, another) or not (is_whole or one.any())


@slow_after_first(
    ("preset", "expected"),
    # The published models, with the classifier.
    [
        ("tiny", 4_386_178),
        ("mini", 11_171_074),
        ("minilm", 22_713_986),
        ("base", 109_483_778),
    ],
)
def test_presets_have_the_size_of_the_published_models(preset, expected):
    config = bert.PRESETS[preset]
    model = nnx.eval_shape(lambda: bert.BertClassifier(config, nnx.Rngs(0)))
    parameters = jax.tree.leaves(nnx.state(model, nnx.Param))
    assert sum(leaf.size for leaf in parameters) == expected


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        (
            {"num_positions": 4, "num_classes": 3},
            [
                "does not fit the model. ",
                "3 arrays differ between it and the model",
                "~ classifier/bias: float32 (2,) in the file, float32 (3,) in the mod",
                "The file has 2 layers of size 32, which is none of the presets.",
            ],
        ),
        (
            {"num_layers": 3},
            [
                "16 arrays differ between",
                "+ layers/2/attention/key/bias: float32 (32,)  the file lacks bert.en",
            ],
        ),
        (
            {"num_layers": 1},
            ["16 arrays differ between", "- layers/1/attention/key/bias: float32 (32,"],
        ),
    ],
)
def test_arrays_that_do_not_fit_are_listed_and_nothing_is_read(
    tmp_path, changes, parts
):
    path = write_model(tmp_path / "model.safetensors", ARRAYS)
    model = make_model(**changes)
    pattern = r"(?s)" + ".*".join(map(re.escape, parts))
    with pytest.raises(ValueError, match=pattern):
        pretrained.load_pretrained(tmp_path, model)
    assert not any(array.any() for array in read_parameters(model))

    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CheckpointDamageError, match=r"is damaged: .*Download it again"):
        pretrained.load_pretrained(path, model)
    path.unlink()
    for missing in (path, tmp_path):
        with pytest.raises(
            FileNotFoundError, match=r"is neither a file \*\.safeten.*0 files"
        ):
            pretrained.load_pretrained(missing, model)
