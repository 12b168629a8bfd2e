"""Samples text from the GPT of `gpt.py` with a key-value cache, and scores text.

`advance` runs the model on new tokens only. Keys and values of the earlier tokens come
from the cache, and the logits equal the logits of the whole sequence. `generate`
samples with it, and each sequence has its own key, so the tokens do not depend on the
number of devices. `generation.py`, `dpo.py` and `policy_gradient.py` import this file.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from gpt import GPT, cross_entropy


class Sampling(NamedTuple):
    """The rule that chooses a token.

    Attributes:
        temperature: The logits are divided by it. 0 always takes the best token.
        top_k: The number of best tokens to draw from. `None` takes all tokens.
    """

    temperature: float = 1.0
    top_k: int | None = None


class Cache(NamedTuple):
    """Keys and values of all blocks: `(depth, batch, length, heads, size)`."""

    keys: jax.Array
    values: jax.Array


def make_cache(model: GPT, batch_size: int, length: int) -> Cache:
    """Returns a cache with room for `length` tokens of each sequence."""
    longest = model.position.num_embeddings
    if length > longest:
        raise ValueError(
            f"`length` is {length}, but the model has positions for {longest} tokens. "
            "Use shorter prompts, or generate fewer tokens."
        )
    kernel = model.blocks.attention_in.kernel[...]
    depth, width, _ = kernel.shape
    num_heads = model.blocks.num_heads
    shape = depth, batch_size, length, num_heads, width // num_heads
    return Cache(jnp.zeros(shape, kernel.dtype), jnp.zeros(shape, kernel.dtype))


def advance(
    model: GPT, tokens: jax.Array, starts: jax.Array, cache: Cache
) -> tuple[jax.Array, Cache]:
    """Runs the model on the next tokens of each sequence.

    Args:
        model: The model.
        tokens: The tokens, `(batch, new)`.
        starts: The number of tokens before them in each sequence, `(batch,)`.
        cache: The keys and values of the tokens before them.

    Returns:
        Logits of shape `(batch, new, num_tokens)`, and the cache with the new tokens.
    """
    positions = starts[:, None] + jnp.arange(tokens.shape[1])[None]
    places = jnp.arange(cache.keys.shape[2])
    is_earlier = places[None, None] <= positions[:, :, None]
    x = model.token(tokens) + model.position(positions)
    graph, blocks = nnx.split(model.blocks)

    def run_block(x: jax.Array, parts: tuple) -> tuple[jax.Array, Cache]:
        state, keys, values = parts
        block = nnx.merge(graph, state)
        query, key, value = block.project(x)
        cache = Cache(write_at(keys, key, starts), write_at(values, value, starts))
        attended = jax.nn.dot_product_attention(
            query, cache.keys, cache.values, mask=is_earlier[:, None]
        )
        return block.finish(x, attended), cache

    x, cache = jax.lax.scan(run_block, x, (blocks, *cache))
    return model.token.attend(model.norm(x)), cache


def write_at(held: jax.Array, new: jax.Array, starts: jax.Array) -> jax.Array:
    """Returns `held`, with the rows of `new` from the start of each sequence on."""
    update = jax.lax.dynamic_update_slice_in_dim
    return jax.vmap(update, in_axes=(0, 0, 0, None))(held, new, starts, 0)


def choose(keys: jax.Array, logits: jax.Array, sampling: Sampling) -> jax.Array:
    """Returns a token for each row of logits, `(batch,)`."""
    if sampling.temperature == 0:
        return jnp.argmax(logits, axis=-1)
    if sampling.top_k is not None:
        best, _ = jax.lax.top_k(logits, min(sampling.top_k, logits.shape[1]))
        logits = jnp.where(logits < best[:, -1:], -jnp.inf, logits)
    return jax.vmap(jax.random.categorical)(keys, logits / sampling.temperature)


def generate(
    model: GPT,
    prompts: jax.Array,
    sizes: jax.Array,
    keys: jax.Array,
    num_tokens: int,
    sampling: Sampling,
) -> jax.Array:
    """Returns the `num_tokens` tokens that the model writes after each prompt.

    Args:
        model: The model.
        prompts: Tokens of shape `(batch, room)`, with padding after the prompts.
        sizes: The number of tokens in each prompt, at least 1: `(batch,)`.
        keys: A key for each prompt, `(batch,)`.
        num_tokens: The number of new tokens of each sequence.
        sampling: The rule that chooses a token.
    """
    cache = make_cache(model, len(prompts), prompts.shape[1] + num_tokens)
    logits, cache = advance(model, prompts, jnp.zeros_like(sizes), cache)
    last = jnp.take_along_axis(logits, sizes[:, None, None] - 1, axis=1)

    def add_token(carry: tuple, index: jax.Array) -> tuple[tuple, jax.Array]:
        logits, cache = carry
        keys_now = jax.vmap(jax.random.fold_in, in_axes=(0, None))(keys, index)
        tokens = choose(keys_now, logits, sampling)
        # The first new token takes the place of the first padding.
        logits, cache = advance(model, tokens[:, None], sizes + index, cache)
        return (logits[:, 0], cache), tokens

    indices = jnp.arange(num_tokens)
    _, tokens = jax.lax.scan(add_token, (last[:, 0], cache), indices)
    return tokens.T


def make_keys(key: jax.Array, numbers: jax.Array) -> jax.Array:
    """Returns a key for each numbered sequence, on any number of devices."""
    return jax.vmap(jax.random.fold_in, in_axes=(None, 0))(key, numbers)


def score(model: GPT, tokens: jax.Array, weights: jax.Array) -> jax.Array:
    """Returns the log-likelihood of a part of each sequence, `(batch,)`.

    Args:
        model: The model.
        tokens: Tokens of shape `(batch, length)`, with padding at the end.
        weights: 1 for each token that counts, and 0 for the prompt and for padding, of
            the same shape. The first token has nothing before it, so it cannot count.
    """
    inputs = tokens[:, :-1]
    positions = jnp.arange(inputs.shape[1])[None]
    logits = model(inputs, jnp.ones_like(inputs), positions)
    losses = cross_entropy(logits, tokens[:, 1:])
    return -jnp.sum(losses * weights[:, 1:], axis=1)
