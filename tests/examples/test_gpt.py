"""Packing loses no token, and packed paragraphs do not see each other."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.examples.loading import load_example
from tests.examples.running import read_steps, run_well

gpt = load_example("gpt")


def make_paragraphs(*lengths):
    rng = np.random.default_rng(0)
    return [rng.integers(1, 9, size=length) for length in lengths]


def make_model(remat=False):
    return gpt.GPT(9, width=8, depth=2, remat=remat, rngs=nnx.Rngs(0))


def test_packing_holds_every_token_once():
    paragraphs = make_paragraphs(5, 100, 30, 1, 300, 127)
    packed = gpt.pack(paragraphs)
    is_text = packed["segments"] > 0
    # Each paragraph has one more input than characters: the edge before it.
    assert is_text.sum() == sum(len(paragraph) + 1 for paragraph in paragraphs)
    assert len(packed["tokens"]) == 5

    found = np.bincount(packed["targets"][is_text], minlength=9)
    expected = np.bincount(np.concatenate(paragraphs), minlength=9)
    expected[gpt.EDGE] = len(paragraphs)
    np.testing.assert_array_equal(found, expected)


def test_each_target_is_the_next_token_of_its_paragraph():
    packed = gpt.pack(make_paragraphs(40, 50, 20, 200))
    tokens, segments = packed["tokens"], packed["segments"]
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
    logits = model(*(together[name] for name in ("tokens", "segments", "positions")))
    for segment, paragraph in enumerate(paragraphs, start=1):
        alone = gpt.pack([paragraph])
        expected = model(*(alone[name] for name in ("tokens", "segments", "positions")))
        found = logits[together["segments"] == segment]
        expected = expected[alone["segments"] == 1]
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
