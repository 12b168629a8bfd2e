"""A decoder-only transformer that computes what Llama, Qwen2 and Gemma compute.

The sources are Touvron et al. (2023), arXiv:2302.13971 for Llama, Yang et al. (2024),
arXiv:2407.10671 for Qwen2, and Mesnard et al. (2024), arXiv:2403.08295 for Gemma. The
parts are RMSNorm (arXiv:1910.07467), rotary positions (arXiv:2104.09864), attention
with fewer heads for keys and values (arXiv:2305.13245), and SwiGLU (arXiv:2002.05202).

The blocks are one module, whose arrays have a first axis of `num_layers`. Every matrix
is the `kernel` of an `nnx.Linear`, of shape `(inputs, outputs)`.
"""

import dataclasses
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "silu": nnx.silu,
    "gelu_pytorch_tanh": lambda x: nnx.gelu(x, approximate=True),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class RotaryScaling:
    """Slower rotation of slow parts, for longer inputs, as Llama 3.1 has it.

    Attributes:
        factor: The quotient of the longest new and old input.
        low_frequency: Parts with fewer turns in an old input are slowed completely.
        high_frequency: Parts with more turns in an old input are not slowed.
        num_positions: Tokens in the longest old input.
    """

    factor: float
    low_frequency: float
    high_frequency: float
    num_positions: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """The size of a model, and how its family differs from Llama.

    Attributes:
        vocabulary_size: Number of tokens.
        hidden_size: Size of each token's vector.
        mlp_size: Size between the two dense layers of a block.
        num_layers: Number of blocks.
        num_heads: Heads of the queries.
        num_kv_heads: Heads of the keys and values, a divisor of `num_heads`.
        head_size: Size of each head, an even number.
        norm_epsilon: A number added to the mean square of a vector.
        rotary_base: The base of the rotary frequencies.
        rotary_scaling: The change of these frequencies, if any.
        activation: The name of the activation, in `ACTIVATIONS`.
        has_qkv_bias: Whether queries, keys and values have a bias, as in Qwen2.
        norm_offset: A number added to the scale of a norm: 1 in Gemma.
        embedding_scale: The factor of an embedding: the root of its size in Gemma.
        is_tied: Whether the embedding is also the output layer.
    """

    vocabulary_size: int
    hidden_size: int
    mlp_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    norm_epsilon: float = 1e-6
    rotary_base: float = 10_000.0
    rotary_scaling: RotaryScaling | None = None
    activation: str = "silu"
    has_qkv_bias: bool = False
    norm_offset: float = 0.0
    embedding_scale: float = 1.0
    is_tied: bool = False


def make_dense(
    before: str, after: str, sizes: dict[str, int], rngs: nnx.Rngs, bias: bool = False
) -> nnx.Linear:
    """Returns a dense layer whose kernel has a name for each axis."""
    kernel_init = nnx.with_partitioning(nnx.initializers.normal(0.02), (before, after))
    return nnx.Linear(
        sizes[before], sizes[after], use_bias=bias, kernel_init=kernel_init, rngs=rngs
    )


class RMSNorm(nnx.Module):
    """Divides each vector by the root of its mean square, in 32 bits."""

    def __init__(self, config: DecoderConfig) -> None:
        self.offset = config.norm_offset
        self.epsilon = config.norm_epsilon
        self.scale = nnx.Param(jnp.full(config.hidden_size, 1.0 - config.norm_offset))

    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns normal vectors for `x`, of shape `(batch, length, hidden_size)`."""
        wide = x.astype(jnp.float32)
        square = jnp.mean(wide**2, axis=-1, keepdims=True)
        normal = wide * jax.lax.rsqrt(square + self.epsilon)
        scale = self.offset + self.scale[...].astype(jnp.float32)
        return (normal * scale[None, None]).astype(x.dtype)


class Attention(nnx.Module):
    """Every token looks at itself and the tokens before it."""

    def __init__(self, config: DecoderConfig, rngs: nnx.Rngs) -> None:
        self.head_size = config.head_size
        sizes = {
            "embed": config.hidden_size,
            "heads": config.num_heads * config.head_size,
            "kv_heads": config.num_kv_heads * config.head_size,
        }
        bias = config.has_qkv_bias
        self.query = make_dense("embed", "heads", sizes, rngs, bias)
        self.key = make_dense("embed", "kv_heads", sizes, rngs, bias)
        self.value = make_dense("embed", "kv_heads", sizes, rngs, bias)
        self.output = make_dense("heads", "embed", sizes, rngs)

    def __call__(self, x: jax.Array, turns: jax.Array) -> jax.Array:
        """Returns new values for `x`, of shape `(batch, length, hidden_size)`."""
        in_heads = (*x.shape[:2], -1, self.head_size)
        query = rotate(self.query(x).reshape(in_heads), turns)
        key = rotate(self.key(x).reshape(in_heads), turns)
        value = self.value(x).reshape(in_heads)
        mixed = jax.nn.dot_product_attention(query, key, value, is_causal=True)
        return self.output(mixed.reshape(*x.shape[:2], -1))


class Block(nnx.Module):
    """Attention and a gated pair of dense layers, each added to its input."""

    def __init__(self, config: DecoderConfig, rngs: nnx.Rngs) -> None:
        sizes = {"embed": config.hidden_size, "mlp": config.mlp_size}
        self.activation = config.activation
        self.attention_norm = RMSNorm(config)
        self.attention = Attention(config, rngs)
        self.mlp_norm = RMSNorm(config)
        self.gate = make_dense("embed", "mlp", sizes, rngs)
        self.up = make_dense("embed", "mlp", sizes, rngs)
        self.down = make_dense("mlp", "embed", sizes, rngs)

    def __call__(self, x: jax.Array, turns: jax.Array) -> jax.Array:
        """Returns new values for `x`, of shape `(batch, length, hidden_size)`."""
        x = x + self.attention(self.attention_norm(x), turns)
        normal = self.mlp_norm(x)
        gate = ACTIVATIONS[self.activation](self.gate(normal))
        return x + self.down(gate * self.up(normal))


class Decoder(nnx.Module):
    """Embedding, blocks, and a layer with a logit for each token."""

    def __init__(self, config: DecoderConfig, rngs: nnx.Rngs) -> None:
        self.config = config
        sizes = {"tokens": config.vocabulary_size, "embed": config.hidden_size}
        init = nnx.with_partitioning(nnx.initializers.normal(0.02), (*sizes,))
        self.embed = nnx.Embed(*sizes.values(), embedding_init=init, rngs=rngs)

        @nnx.split_rngs(splits=config.num_layers)
        @nnx.vmap(transform_metadata={nnx.PARTITION_NAME: "blocks"})
        def make_blocks(rngs: nnx.Rngs) -> Block:
            return Block(config, rngs)

        self.blocks = make_blocks(rngs)
        self.norm = RMSNorm(config)
        if not config.is_tied:
            self.head = make_dense("embed", "tokens", sizes, rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Returns a logit of each token for the next one.

        Args:
            tokens: Numbers of tokens, of shape `(batch, length)`. Padding comes last.

        Returns:
            An array of shape `(batch, length, vocabulary_size)`.
        """
        x = self.embed(tokens)
        x = x * jnp.asarray(self.config.embedding_scale, x.dtype)
        turns = make_turns(self.config, tokens.shape[1])
        graph, blocks = nnx.split(self.blocks)

        def run_block(x: jax.Array, block: nnx.State) -> tuple[jax.Array, None]:
            return nnx.merge(graph, block)(x, turns), None

        x, _ = jax.lax.scan(run_block, x, blocks)
        x = self.norm(x)
        return self.embed.attend(x) if self.config.is_tied else self.head(x)


def make_turns(config: DecoderConfig, length: int) -> jax.Array:
    """Returns the angle of each position and pair, of shape `(length, pairs)`."""
    pairs = jnp.arange(0, config.head_size, 2, dtype=jnp.float32)
    speeds = 1.0 / config.rotary_base ** (pairs / config.head_size)
    scaling = config.rotary_scaling
    if scaling is not None:
        # The number of turns in a long input before the change.
        turns = scaling.num_positions * speeds / (2 * math.pi)
        between = scaling.high_frequency - scaling.low_frequency
        kept = jnp.clip((turns - scaling.low_frequency) / between, 0.0, 1.0)
        speeds = kept * speeds + (1 - kept) * speeds / scaling.factor
    return jnp.outer(jnp.arange(length, dtype=jnp.float32), speeds)


def rotate(x: jax.Array, turns: jax.Array) -> jax.Array:
    """Turns each pair of numbers by the angle of its position.

    A pair is a number of the first half of a head and one of the second half. `x` has
    the shape `(batch, length, heads, head_size)`.
    """
    cosine = jnp.cos(turns)[None, :, None].astype(x.dtype)
    sine = jnp.sin(turns)[None, :, None].astype(x.dtype)
    first, second = jnp.split(x, 2, axis=-1)
    turned = (first * cosine - second * sine, second * cosine + first * sine)
    return jnp.concatenate(turned, axis=-1)
