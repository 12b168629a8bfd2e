"""The model of the BERT example, against its equations in NumPy."""

import jax
import numpy as np
import pytest
from flax import nnx

from tests.examples.bert_reference import classify, make_arrays
from tests.examples.bundle_writer import write_bundle
from tests.examples.loading import load_example

model_module = load_example("bert.model")
pretrained = load_example("bert.pretrained")

SMALL = model_module.BertConfig(
    num_layers=2, hidden_size=32, num_heads=4, vocabulary_size=50, num_positions=12
)


def make_batch(length: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(1)
    lengths = np.array([length, 5, 1])[:, None]
    mask = (np.arange(length) < lengths).astype("int32")
    ids = rng.integers(0, SMALL.vocabulary_size, mask.shape).astype("int32")
    types = (np.arange(length) >= lengths // 2).astype("int32")
    return ids, mask, types


@pytest.mark.slow
def test_logits_are_those_of_the_equations(tmp_path):
    arrays = make_arrays(SMALL)
    model = nnx.eval_shape(lambda: model_module.BertClassifier(SMALL, nnx.Rngs(0)))
    pretrained.load_pretrained(write_bundle(tmp_path / "bert", arrays), model)
    evaluated = nnx.view(model, deterministic=True)
    definition, parameters, others = nnx.split(evaluated, nnx.Param, ...)
    batch = make_batch(length=9)
    logits = jax.jit(lambda p: nnx.merge(definition, p, others)(*batch))(parameters)
    expected = classify(arrays, SMALL, *batch)
    assert np.abs(expected).max() > 1.0
    np.testing.assert_allclose(logits, expected, atol=1e-5)


@pytest.mark.each_case
@pytest.mark.slow
@pytest.mark.parametrize(
    ("preset", "expected"),
    # Those that are published, with the classifier.
    [("tiny", 4_386_178), ("mini", 11_171_074), ("base", 109_483_778)],
)
def test_presets_have_the_size_of_the_published_models(preset, expected):
    config = model_module.PRESETS[preset]
    model = nnx.eval_shape(lambda: model_module.BertClassifier(config, nnx.Rngs(0)))
    parameters = jax.tree.leaves(nnx.state(model, nnx.Param))
    assert sum(leaf.size for leaf in parameters) == expected
