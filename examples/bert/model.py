"""BERT with a classifier on top, after Devlin et al. (2018), arXiv:1810.04805.

Layer norm comes after each residual sum, GELU is exact, and a dense layer with tanh
pools the first token. Every matrix has two axes and every other parameter has one.
"""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx

_initial = nnx.initializers.truncated_normal(0.02)


@dataclasses.dataclass(frozen=True, kw_only=True)
class BertConfig:
    """The size of a model; the defaults fit the English models.

    Attributes:
        num_layers: Layers of the encoder.
        hidden_size: Size of each token's vector, a multiple of `num_heads`.
        num_heads: Heads of attention in each layer.
        vocabulary_size: Number of WordPieces.
        num_positions: Tokens in the longest input.
        num_types: Number of sentences in an input.
        num_classes: Number of classes to tell apart.
        dropout: The rate of all dropout, including attention weights.
    """

    num_layers: int
    hidden_size: int
    num_heads: int
    vocabulary_size: int = 30_522
    num_positions: int = 512
    num_types: int = 2
    num_classes: int = 2
    dropout: float = 0.1


PRESETS = {
    "tiny": BertConfig(num_layers=2, hidden_size=128, num_heads=2),
    "mini": BertConfig(num_layers=4, hidden_size=256, num_heads=4),
    "minilm": BertConfig(num_layers=6, hidden_size=384, num_heads=12),
    "base": BertConfig(num_layers=12, hidden_size=768, num_heads=12),
}


class Attention(nnx.Module):
    """Every token looks at every other token that is no padding."""

    def __init__(self, config: BertConfig, rngs: nnx.Rngs) -> None:
        size = config.hidden_size
        dense = partial(nnx.Linear, size, size, kernel_init=_initial, rngs=rngs)
        self.query = dense()
        self.key = dense()
        self.value = dense()
        self.output = dense()
        self.dropout = nnx.Dropout(config.dropout, rngs=rngs)
        self.num_heads = config.num_heads

    def __call__(self, x: jax.Array, mask: jax.Array) -> jax.Array:
        """Returns new values for `x`, of shape `(batch, length, hidden_size)`."""
        in_heads = (*x.shape[:2], self.num_heads, x.shape[2] // self.num_heads)
        query, key, value = (
            dense(x).reshape(in_heads) for dense in (self.query, self.key, self.value)
        )
        scores = jnp.einsum("bqhd,bkhd->bhqk", query, key) / in_heads[-1] ** 0.5
        scores = jnp.where(mask[:, None, None, :], scores, -1e9)
        weights = self.dropout(nnx.softmax(scores))
        mixed = jnp.einsum("bhqk,bkhd->bqhd", weights, value)
        return self.output(mixed.reshape(x.shape))


class Layer(nnx.Module):
    """Attention and two dense layers, each added to its input and normalized."""

    def __init__(self, config: BertConfig, rngs: nnx.Rngs) -> None:
        size = config.hidden_size
        dense = partial(nnx.Linear, kernel_init=_initial, rngs=rngs)
        self.attention = Attention(config, rngs)
        self.attention_norm = nnx.LayerNorm(size, epsilon=1e-12, rngs=rngs)
        self.expand = dense(size, 4 * size)
        self.shrink = dense(4 * size, size)
        self.output_norm = nnx.LayerNorm(size, epsilon=1e-12, rngs=rngs)
        self.dropout = nnx.Dropout(config.dropout, rngs=rngs)

    def __call__(self, x: jax.Array, mask: jax.Array) -> jax.Array:
        """Returns new values for `x`, of shape `(batch, length, hidden_size)`."""
        x = self.attention_norm(x + self.dropout(self.attention(x, mask)))
        hidden = nnx.gelu(self.expand(x), approximate=False)
        return self.output_norm(x + self.dropout(self.shrink(hidden)))


class BertClassifier(nnx.Module):
    """Embeddings, encoder, pooler and classifier.

    It has dropout: `nnx.view(model, deterministic=True)` is the model to evaluate.
    """

    def __init__(self, config: BertConfig, rngs: nnx.Rngs) -> None:
        size = config.hidden_size
        embed = partial(nnx.Embed, features=size, embedding_init=_initial, rngs=rngs)
        dense = partial(nnx.Linear, size, kernel_init=_initial, rngs=rngs)
        self.words = embed(config.vocabulary_size)
        self.positions = embed(config.num_positions)
        self.types = embed(config.num_types)
        self.norm = nnx.LayerNorm(size, epsilon=1e-12, rngs=rngs)
        self.dropout = nnx.Dropout(config.dropout, rngs=rngs)
        self.layers = nnx.List([Layer(config, rngs) for _ in range(config.num_layers)])
        self.pooler = dense(size)
        self.classifier = dense(config.num_classes)

    def __call__(
        self, input_ids: jax.Array, input_mask: jax.Array, segment_ids: jax.Array
    ) -> jax.Array:
        """Returns logits.

        Args:
            input_ids: Numbers of WordPieces, of shape `(batch, length)`.
            input_mask: 1 for a token and 0 for padding, of the same shape.
            segment_ids: 0 in the first sentence and 1 in the second, likewise.

        Returns:
            An array of shape `(batch, num_classes)`.
        """
        positions = self.positions(jnp.arange(input_ids.shape[1]))[None]
        x = self.words(input_ids) + positions + self.types(segment_ids)
        x = self.dropout(self.norm(x))
        for layer in self.layers:
            x = layer(x, input_mask > 0)
        return self.classifier(self.dropout(nnx.tanh(self.pooler(x[:, 0]))))
