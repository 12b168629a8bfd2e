"""Tests that data which stays on the device changes only the speed."""

import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import armillary
from armillary.data import InputOptions, from_arrays
from armillary.trainer._program import take_batches
from tests.feeds import open_chunks
from tests.problems import (
    CNN,
    MLP,
    Classifier,
    Metrics,
    assert_identical,
    make_digits,
    make_strategy,
    read_state,
)
from tests.tiers import slow_after_first

MAKERS = {
    "default": armillary.distribute.DefaultStrategy,
    "one device": lambda: armillary.OneDeviceStrategy("cpu:1"),
    "mirrored 4": lambda: make_strategy(4),
}


@pytest.fixture(params=MAKERS)
def strategy(request):
    return MAKERS[request.param]()


def make_data(strategy, is_resident, num_examples=72, **arguments):
    """Returns a shuffled dataset whose epochs end inside batches and chunks."""
    arguments = {"batch_size": 16, "shuffle_seed": 3, "repeat": True} | arguments
    source = from_arrays(make_digits(num_examples), **arguments)
    options = InputOptions(place_on_device=is_resident)
    return strategy.distribute_dataset(source, options)


def make_trainer(strategy, is_resident, model=MLP, **options):
    dataset = make_data(strategy, is_resident)
    options = {"steps_per_chunk": 7} | options
    return Classifier(
        strategy, model(nnx.Rngs(0)), optax.adam(3e-3), dataset, **options
    )


def train(trainer, *lengths):
    for num_steps in lengths:
        trainer.train(num_steps)
    return read_state(trainer)


# Training


@pytest.mark.slow
@slow_after_first("model", [MLP, CNN])
def test_training_is_bit_identical_over_epochs(strategy, model):
    lengths = (1, 9, 13, 7)
    host = make_trainer(strategy, False, model)
    resident = make_trainer(strategy, True, model)

    assert_identical(train(resident, *lengths), train(host, *lengths))
    assert resident.train_dataset.get_state() == host.train_dataset.get_state()
    assert host.train_dataset.get_state()["source"]["epoch"] == 6


@pytest.mark.parametrize("is_resident", [True, False])
def test_taking_batches_needs_no_collective_and_no_copy_of_the_arrays(is_resident):
    dataset = make_data(make_strategy(4), is_resident, num_examples=4096)
    chunk = open_chunks(dataset, steps_per_chunk=64).next_chunk()

    def run(inputs, num_steps):
        def body(index, total):
            image, label = take_batches(inputs, [1], [dataset.input.gather], index)
            return total + image.sum((1, 2, 3, 4)) + label.sum(1)

        return jax.lax.fori_loop(0, num_steps, body, jnp.zeros(4))

    compiled = jax.jit(run).lower(chunk.inputs, np.int32(64)).compile()

    operations = re.findall(r" ([a-z-]+)\(", compiled.as_text())
    assert "while" in operations
    assert not {"all-gather", "all-reduce", "all-to-all", "collective-permute"} & set(
        operations
    )
    num_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(chunk.inputs))
    assert compiled.memory_analysis().temp_size_in_bytes < num_bytes / 20


class Squashes(armillary.StandardTrainer):
    """A trainer whose arithmetic compilers like to merge with reading its data."""

    def __init__(self, strategy, dataset, **options):
        super().__init__(dataset, armillary.StandardTrainerOptions(**options))
        self.strategy = strategy
        self.totals = jnp.zeros(6)

    def train_step(self, iterator):
        def step_fn(batch):
            x = batch["x"].astype(jnp.float32)
            rows = x.reshape(x.shape[0], -1)
            return jnp.stack(
                [
                    x.sum(),
                    jnp.tanh(x).mean(),
                    (x * x).sum(),
                    jnp.exp(rows * 0.01).sum(0).max(),
                    jnp.linalg.norm(rows, axis=1).sum(),
                    rows.var(0).sum(),
                ]
            )

        values = self.strategy.run(step_fn, args=(next(iterator),))
        self.totals = self.totals * 0.5 + self.strategy.reduce("sum", values)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [np.float32, np.uint8])
def test_arithmetic_on_the_rows_rounds_alike_in_chunks_of_any_size(strategy, dtype):
    values = np.random.default_rng(0).normal(size=200) * 50
    source = from_arrays(
        {"x": values.astype(dtype)}, batch_size=32, shuffle_seed=1, repeat=True
    )
    totals = []
    for is_resident, steps_per_chunk in itertools.product((False, True), (None, 1, 7)):
        options = InputOptions(place_on_device=is_resident)
        dataset = strategy.distribute_dataset(source, options)
        trainer = Squashes(strategy, dataset, steps_per_chunk=steps_per_chunk)
        totals.append([])
        for _ in range(45):
            trainer.train(1)
            totals[-1].append(np.asarray(trainer.totals).tolist())
    assert all(each == totals[0] for each in totals)


# Steps of several batches, and nests


class Pairs(armillary.StandardTrainer):
    """Takes two batches of one dataset and one of the other in each step."""

    def __init__(self, strategy, first, second, **options):
        options = armillary.StandardTrainerOptions(steps_per_chunk=3, **options)
        super().__init__({"first": first, "second": second}, options)
        self.strategy = strategy
        self.seen = jnp.zeros((16, 3), jnp.int32)
        self.num_steps = armillary.create_global_step()

    def train_step(self, iterator):
        values = [
            identify(self.strategy, next(iterator[name]))
            for name in ("first", "second", "first")
        ]
        self.seen = self.seen.at[self.num_steps[...]].set(jnp.stack(values))
        self.num_steps[...] += 1


def identify(strategy, batch):
    """Returns a number that tells which rows a batch has."""
    value = strategy.run(
        lambda b: jnp.sum(b["label"] * jnp.round(b["image"][:, 0, 0, 0] * 100)),
        args=(batch,),
    )
    return strategy.reduce("sum", value).astype(jnp.int32)


@pytest.mark.slow
@pytest.mark.parametrize("kinds", [(True, True), (True, False), (False, True)], ids=str)
def test_each_dataset_of_a_nest_may_stay_on_the_device(strategy, kinds):
    seen = []
    for first, second in ((False, False), kinds):
        trainer = Pairs(
            strategy,
            make_data(strategy, first),
            make_data(strategy, second, batch_size=8, shuffle_seed=9),
        )
        train(trainer, 4, 7)
        seen.append(np.asarray(trainer.seen))
    assert len(np.unique(seen[0][:11])) > 20
    np.testing.assert_array_equal(seen[1], seen[0])


# Evaluation


@pytest.mark.slow
@pytest.mark.parametrize("compile_step", [True, False])
def test_a_complete_evaluation_sees_every_example_once(strategy, compile_step):
    rng = np.random.default_rng(0)
    label = rng.integers(0, 3, 13).astype(np.int32)
    logits = rng.normal(size=(13, 3)).astype(np.float32)
    arrays = {"value": logits[:, 0], "logits": logits, "label": label}
    options = InputOptions(place_on_device=True)
    source = from_arrays(arrays, batch_size=10)
    dataset = strategy.distribute_dataset(source, options)
    evaluator = Metrics(strategy, dataset, compile_step=compile_step)
    for _ in range(2):
        output = evaluator.evaluate(-1)
        assert evaluator.counts == (13, 13)
        assert float(output["average"]) == pytest.approx(logits[:, 0].mean(), rel=1e-5)
        right = np.mean(logits.argmax(1) == label)
        assert float(output["accuracy"]) == pytest.approx(right)
