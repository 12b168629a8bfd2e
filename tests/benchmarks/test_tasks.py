"""Tests of the data, models and sizes of the benchmark tasks."""

import jax
import numpy as np
import pytest
from flax import nnx

from benchmarks.models import make_model
from benchmarks.tasks import TASKS, make_task


@pytest.mark.parametrize("name", TASKS)
def test_data_is_the_same_every_time_and_has_every_class(name):
    task = make_task(name, "small")
    first, again = task.make_arrays(), task.make_arrays()
    assert first.keys() == again.keys()
    for key, array in first.items():
        assert len(array) == task.num_examples
        assert array.dtype in (np.int32, np.float32)
        np.testing.assert_array_equal(array, again[key])
    assert len(np.unique(first["label"])) == task.num_classes


@pytest.mark.parametrize("name", TASKS)
def test_model_gives_one_logit_for_each_class_of_a_label(name):
    task = make_task(name, "small")
    batch = {key: array[:3] for key, array in task.make_arrays().items()}
    logits = nnx.eval_shape(lambda: make_model(task, nnx.Rngs(0), "float32")(batch))
    label = batch["label"]
    assert logits.shape == (*label.shape, task.num_classes)


def count_parameters(name: str) -> tuple[int, int]:
    task = make_task(name)
    model = nnx.eval_shape(lambda: make_model(task, nnx.Rngs(0), "float32"))
    leaves = jax.tree.leaves(nnx.state(model, nnx.Param))
    return len(leaves), sum(leaf.size for leaf in leaves)


def test_a_word_is_predicted_from_earlier_words_only():
    task = make_task("gpt", "small")
    model = make_model(task, nnx.Rngs(0), "float32")
    words = task.make_arrays()["word_ids"][:2]
    changed = words.copy()
    changed[:, 5:] = (changed[:, 5:] + 1) % task.num_classes

    before = np.asarray(model({"word_ids": words}))
    after = np.asarray(model({"word_ids": changed}))

    np.testing.assert_array_equal(before[:, :5], after[:, :5])
    assert np.all(np.any(before[:, 5:] != after[:, 5:], axis=-1))


@pytest.mark.slow
def test_full_sizes_are_those_that_the_figures_are_about():
    assert count_parameters("mlp") == (4, 784 * 64 + 64 + 64 * 10 + 10)
    assert count_parameters("many-leaves") == (400, 200 * 72)
    assert count_parameters("cnn")[1] == 320 + 18_496 + 3136 * 64 + 64 + 650
    # BERT-base has 109 million parameters with 512 positions; here there are 128.
    assert 109.0e6 < count_parameters("bert-base")[1] < 109.5e6
    assert make_task("bert").batch_size == make_task("bert-base").batch_size == 32
