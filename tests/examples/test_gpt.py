"""Packing loses no token, and packed paragraphs do not see each other."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import armillary
from tests.examples.loading import load_example
from tests.examples.running import read_steps, run_well

gpt = load_example("gpt")


def make_paragraphs(*lengths):
    rng = np.random.default_rng(0)
    return [rng.integers(1, 9, size=length) for length in lengths]


def make_model(remat=False):
    with nnx.use_eager_sharding(False):
        return gpt.GPT(9, width=8, depth=2, remat=remat, rngs=nnx.Rngs(0))


def test_packing_holds_every_token_once():
    paragraphs = make_paragraphs(5, 100, 30, 1, 300, 127)
    packed = gpt.pack(paragraphs)
    is_text = packed["segment_ids"] > 0
    # Each paragraph has one more input than characters: the edge before it.
    assert is_text.sum() == sum(len(paragraph) + 1 for paragraph in paragraphs)
    assert len(packed["tokens"]) == 5

    found = np.bincount(packed["targets"][is_text], minlength=9)
    expected = np.bincount(np.concatenate(paragraphs), minlength=9)
    expected[gpt.EDGE] = len(paragraphs)
    np.testing.assert_array_equal(found, expected)


def test_each_target_is_the_next_token_of_its_paragraph():
    packed = gpt.pack(make_paragraphs(40, 50, 20, 200))
    tokens, segments = packed["tokens"], packed["segment_ids"]
    has_next = (segments[:, :-1] == segments[:, 1:]) & (segments[:, 1:] > 0)
    targets = packed["targets"][:, :-1]
    np.testing.assert_array_equal(targets[has_next], tokens[:, 1:][has_next])

    positions = packed["positions"]
    steps = np.diff(positions, axis=1)
    assert (steps[has_next] == 1).all()
    begins = np.diff(segments, axis=1, prepend=0) > 0
    assert (positions[begins] == 0).all()


def test_text_has_every_topic_and_every_character():
    train, held_out, characters = gpt.load_data()
    assert len(train["tokens"]) > 5 * len(held_out["tokens"]) > 1000
    assert len(set(characters)) == len(characters) > 90
    assert train["tokens"].max() < len(characters)


@pytest.mark.slow
def test_a_packed_paragraph_has_the_logits_of_the_paragraph_alone():
    paragraphs = make_paragraphs(60, 50)
    model = nnx.jit(make_model())
    together = gpt.pack(paragraphs)
    assert together["tokens"].shape[0] == 1
    logits = model(*(together[name] for name in ("tokens", "segment_ids", "positions")))
    for segment, paragraph in enumerate(paragraphs, start=1):
        alone = gpt.pack([paragraph])
        expected = model(
            *(alone[name] for name in ("tokens", "segment_ids", "positions"))
        )
        found = logits[together["segment_ids"] == segment]
        expected = expected[alone["segment_ids"] == 1]
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_remat_changes_no_gradient():
    batch = gpt.pack(make_paragraphs(60, 50, 100))

    @nnx.jit
    def differentiate(model):
        def loss_fn(model):
            losses, weights = gpt.compute_losses(model, batch)
            return jnp.sum(losses * weights) / jnp.sum(weights)

        return nnx.grad(loss_fn)(model)

    gradients = [differentiate(make_model(remat)) for remat in (False, True)]
    for expected, found in zip(*map(jax.tree.leaves, gradients), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_training_continues_with_another_strategy(tmp_path):
    arguments = ("--run-dir", tmp_path, "--devices", 2, "--steps-per-loop", 20)
    arguments += ("--width", 16, "--depth", 1)
    first = run_well("gpt.py", *arguments, "--steps", 20, "--strategy", "sharded")
    second = run_well(
        "gpt.py", *arguments, "--steps", 60, "--strategy", "mirrored", "--remat"
    )
    pattern = r"Perplexity ([\d.]+), loss ([\d.]+)\nA sample:\n"
    [(before, _)] = re.findall(pattern, first.stdout)
    [(after, loss)] = re.findall(pattern, second.stdout)
    assert read_steps(second.stderr) == [40, 60]
    assert float(after) < float(before)
    assert float(after) == pytest.approx(np.exp(float(loss)), rel=0.01)


def test_only_kernels_decay_after_a_warm_up():
    with nnx.use_eager_sharding(False):
        parameters = nnx.state(make_model(), nnx.Param)
    optimizer = gpt.make_optimizer(20)
    zeros = jax.tree.map(jnp.zeros_like, parameters)
    state = optimizer.init(parameters)
    first, state = optimizer.update(zeros, state, parameters)
    second, _ = optimizer.update(zeros, state, parameters)
    # The rate of the first step is 0.
    assert all(np.all(np.asarray(leaf) == 0) for leaf in jax.tree.leaves(first))
    for path, leaf in jax.tree_util.tree_leaves_with_path(second):
        assert np.any(np.asarray(leaf)) == ("kernel" in jax.tree_util.keystr(path))


def test_parts_of_a_batch_hold_each_row_once():
    rows = jnp.arange(12.0).reshape(6, 2)
    parts = gpt.split({"x": rows}, 3)["x"]
    assert parts.shape == (3, 2, 2)
    np.testing.assert_array_equal(jnp.sort(parts.ravel()), rows.ravel())
    np.testing.assert_array_equal(parts[1], rows[1::3])


MODEL = {"num_tokens": 9, "width": 16, "depth": 2, "remat": True}
NUM_STEPS = 4
STRATEGIES = {
    "one device": lambda: armillary.OneDeviceStrategy("cpu:0"),
    "mirrored": lambda: armillary.MirroredStrategy(jax.devices()[:4]),
    "fsdp": lambda: armillary.ShardedStrategy(logical_rules=gpt.LOGICAL_RULES),
    "fsdp and tensor": lambda: armillary.ShardedStrategy(
        {"fsdp": 4, "tensor": 2}, logical_rules=gpt.LOGICAL_RULES
    ),
    "data and fsdp": lambda: armillary.ShardedStrategy(
        {"data": 2, "fsdp": 4}, logical_rules=gpt.LOGICAL_RULES
    ),
}

SHARES = {
    "one device": (2, 16, 64),
    "mirrored": (2, 16, 64),
    "fsdp": (2, 2, 64),
    "fsdp and tensor": (2, 4, 32),
    "data and fsdp": (2, 4, 64),
}
"""The part of a kernel on a device."""


@functools.cache
def train(name, num_parts):
    """Returns the loss of each step, and the state."""
    rows = gpt.pack(make_paragraphs(*range(20, 180)))
    trainer, _ = gpt.make_trainer(STRATEGIES[name](), rows, MODEL, NUM_STEPS, num_parts)
    losses = [float(trainer.train(1)["loss"]) for _ in range(NUM_STEPS)]
    return losses, trainer.state


@pytest.mark.slow
@pytest.mark.parametrize("num_parts", [1, 2])
@pytest.mark.parametrize("name", STRATEGIES)
def test_losses_are_the_losses_of_one_device(name, num_parts):
    expected, _ = train("one device", 1)
    losses, state = train(name, num_parts)
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    assert losses[-1] < losses[0]
    kernel = state["parameters"]["blocks"]["up"]["kernel"][...]
    assert kernel.shape == (2, 16, 64)
    assert kernel.sharding.shard_shape(kernel.shape) == SHARES[name]
