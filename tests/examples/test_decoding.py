"""Decoding with a cache equals the whole model, and devices do not change a token."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.examples.loading import load_example

decoding = load_example("decoding")
gpt = load_example("gpt")


@functools.cache
def make_model():
    with nnx.use_eager_sharding(False):
        return gpt.GPT(9, width=16, depth=2, remat=False, rngs=nnx.Rngs(0))


def make_tokens(*shape):
    return np.random.default_rng(0).integers(1, 9, size=shape)


def run_whole(model, tokens):
    tokens = np.asarray(tokens)
    positions = np.arange(tokens.shape[1])[None]
    return model(tokens, np.ones_like(tokens), positions)


def test_logits_with_a_cache_are_the_logits_of_the_whole_sequence():
    tokens = make_tokens(3, 10)
    expected = run_whole(make_model(), tokens)
    advance = nnx.jit(decoding.advance)

    cache = decoding.make_cache(make_model(), 3, 12)
    starts = jnp.zeros(3, int)
    logits, cache = advance(make_model(), tokens[:, :6], starts, cache)
    np.testing.assert_allclose(logits, expected[:, :6], rtol=1e-5, atol=1e-5)
    for place in range(6, 10):
        new = tokens[:, place : place + 1]
        logits, cache = advance(make_model(), new, starts + place, cache)
        np.testing.assert_allclose(
            logits[:, 0], expected[:, place], rtol=1e-5, atol=1e-5
        )


def test_a_sequence_beyond_the_last_position_is_an_error():
    with pytest.raises(ValueError, match=r"`length` is 129, .* 128 tokens.*fewer"):
        decoding.make_cache(make_model(), 1, gpt.LENGTH + 1)


PROMPTS = make_tokens(4, 5)
SIZES = np.array([1, 5, 3, 4])
NUM_TOKENS = 6


@functools.partial(nnx.jit, static_argnames="sampling")
def generate(model, prompts, sizes, seed, sampling):
    numbers = jnp.arange(len(prompts))
    keys = decoding.make_keys(jax.random.key(seed), numbers)
    return decoding.generate(model, prompts, sizes, keys, NUM_TOKENS, sampling)


GREEDY = decoding.Sampling(temperature=0.0)


@pytest.mark.slow
def test_greedy_tokens_are_the_best_tokens_of_the_whole_model():
    found = generate(make_model(), PROMPTS, SIZES, 0, GREEDY)
    assert found.shape == (4, NUM_TOKENS)
    for prompt, size, tokens in zip(PROMPTS, SIZES, found, strict=True):
        sequence = [*prompt[:size], *tokens]
        logits = run_whole(make_model(), [sequence])[0]
        best = logits[size - 1 : -1].argmax(axis=-1)
        np.testing.assert_array_equal(tokens, best)


@pytest.mark.slow
def test_padding_after_a_prompt_changes_nothing():
    padded = np.where(np.arange(5) < SIZES[:, None], PROMPTS, 7)
    wide = np.pad(padded, ((0, 0), (0, 2)), constant_values=3)
    sampling = decoding.Sampling(temperature=0.7)
    expected = generate(make_model(), PROMPTS, SIZES, 1, sampling)
    found = generate(make_model(), wide, SIZES, 1, sampling)
    np.testing.assert_array_equal(found, expected)
    other = generate(make_model(), PROMPTS, SIZES, 2, sampling)
    assert np.any(other != expected)


def test_tokens_are_drawn_from_the_best_with_the_right_shares():
    logits = jnp.log(jnp.array([[0.1, 0.4, 0.2, 0.3]]))
    rows = jnp.repeat(logits, 20_000, axis=0)
    keys = decoding.make_keys(jax.random.key(0), jnp.arange(len(rows)))

    def measure(**options):
        chosen = decoding.choose(keys, rows, decoding.Sampling(**options))
        return np.bincount(chosen, minlength=4) / len(rows)

    np.testing.assert_allclose(measure(), [0.1, 0.4, 0.2, 0.3], atol=0.02)
    np.testing.assert_allclose(measure(top_k=2), [0, 4 / 7, 0, 3 / 7], atol=0.02)
    # A temperature of 0.5 squares the probabilities: their sum is 0.3.
    squares = np.array([0.01, 0.16, 0.04, 0.09]) / 0.3
    np.testing.assert_allclose(measure(temperature=0.5), squares, atol=0.02)
    np.testing.assert_array_equal(measure(temperature=0.0), [0, 1, 0, 0])


def test_a_score_is_the_sum_of_the_log_probabilities_of_the_tokens_that_count():
    tokens = make_tokens(2, 7)
    weights = np.array([[0, 0, 1, 1, 1, 1, 0], [0, 1, 1, 0, 0, 0, 0]])
    found = nnx.jit(decoding.score)(make_model(), tokens, weights)
    probabilities = nnx.softmax(run_whole(make_model(), tokens))
    for row, size in enumerate(weights.sum(axis=1)):
        expected = sum(
            float(np.log(probabilities[row, place - 1, tokens[row, place]]))
            for place in np.flatnonzero(weights[row])
        )
        assert found[row] == pytest.approx(expected, rel=1e-5), size
