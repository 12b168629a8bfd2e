"""Tests of the collectives of a step, and of the assertion for users' tests."""

from dataclasses import replace

import jax
import numpy as np
import optax
import pytest
from flax import nnx

import armillary
from armillary.testing import assert_collectives, find_collectives
from tests.examples.loading import load_example
from tests.plan.digits_mlp import NUM_PARAMETERS, Trainer, make_trainer

METRIC_BYTES = 8
LENGTH = 32  # of sentences in tokens


def test_a_step_sums_its_gradients_once_and_sends_nothing_else():
    trainer = make_trainer(2)
    assert_collectives(trainer, max_bytes=4 * NUM_PARAMETERS + METRIC_BYTES)
    assert {each.group_size for each in find_collectives(trainer)} == {8}
    assert {each.group_size for each in find_collectives(trainer, 4)} == {4}


class NormalizesGlobally(Trainer):
    """Sums statistics over replicas first, and then gradients."""

    def improve(self, batch):
        context = armillary.get_replica_context()
        mean = context.all_reduce("mean", batch["image"].mean())
        super().improve({**batch, "image": batch["image"] - mean})


class GathersLabels(Trainer):
    def improve(self, batch):
        labels = armillary.get_replica_context().all_gather(batch["label"], axis=0)
        weight = 1.0 + labels[0]
        super().improve({**batch, "image": batch["image"] * weight})


@pytest.mark.slow
def test_a_sum_that_the_gradients_wait_for_is_a_round_of_its_own():
    trainer = make_trainer(kind=NormalizesGlobally)
    assert_collectives(trainer, all_reduce=2)
    with pytest.raises(
        AssertionError, match="has 2 rounds of `all_reduce` and not 1"
    ) as error:
        assert_collectives(trainer)
    assert "round 1: all-reduce of 4 bytes" in str(error.value)
    assert "round 2: all-reduce of" in str(error.value)


@pytest.mark.slow
def test_a_collective_of_another_kind_and_too_many_bytes_are_errors():
    trainer = make_trainer(kind=GathersLabels)
    with pytest.raises(AssertionError, match="has 1 rounds of `all_gather` and not 0"):
        assert_collectives(trainer)
    message = r"has \d+ bytes on each device, and `max_bytes` is 100"
    with pytest.raises(AssertionError, match=message):
        assert_collectives(make_trainer(), max_bytes=100)


@pytest.mark.parametrize("count", [1, 9])
def test_there_must_be_a_cpu_device_for_each_of_several_replicas(count):
    with pytest.raises(ValueError, match="jax_num_cpu_devices"):
        assert_collectives(make_trainer(), num_replicas=count)


def make_example(name):
    """Returns the trainer of an example, and how many sums follow each other."""
    example = load_example(name)
    strategy = armillary.MirroredStrategy(jax.devices("cpu")[:2])
    rng = np.random.default_rng(0)
    if name == "bert_mrpc":
        shape = (64, LENGTH)
        arrays = {
            "input_ids": rng.integers(100, size=shape, dtype=np.int32),
            "input_mask": np.ones(shape, np.int32),
            "segment_ids": np.zeros(shape, np.int32),
            "label_ids": np.arange(64, dtype=np.int32) % 2,
        }
        source = armillary.data.from_arrays(arrays, batch_size=32)
        config = replace(example.PRESETS["tiny"], vocabulary_size=100)
        model = example.BertClassifier(config, nnx.Rngs(0))
        optimizer = example.make_optimizer(model, 1e-4, 100)
        return example.Trainer(source, strategy, model, optimizer), 1
    if name == "breast_cancer":
        arrays = {"x": rng.random((64, 30), "float32"), "y": np.arange(64) % 2}
        model = nnx.Sequential(
            nnx.Linear(30, 8, rngs=nnx.Rngs(0)),
            nnx.relu,
            nnx.Linear(8, 1, rngs=nnx.Rngs(1)),
        )
    else:
        images = rng.random((64, 8, 8, 1), "float32")
        arrays = {"image": images, "label": np.arange(64, dtype=np.int32) % 10}
        model = example.CNN(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)
    source = armillary.data.from_arrays(arrays, batch_size=32)
    # The step of `breast_cancer` also sums a histogram of the reduced gradients.
    num_rounds = 2 if name == "breast_cancer" else 1
    return example.Trainer(source, strategy, model, optimizer), num_rounds


@pytest.mark.slow
@pytest.mark.parametrize("name", ["digits", "breast_cancer", "bert_mrpc"])
def test_steps_of_the_examples_sum_gradients_once_for_each_update(name):
    trainer, num_rounds = make_example(name)
    parameters = nnx.state(trainer.model, nnx.Param)
    num_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(parameters))
    limit = None if name == "breast_cancer" else num_bytes + 64  # what metrics add up
    assert_collectives(trainer, all_reduce=num_rounds, max_bytes=limit)
