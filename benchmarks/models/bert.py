"""The model of tasks `bert` and `bert-base`."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from benchmarks.tasks._task import Batch
from benchmarks.tasks.bert import BertTask

_initial = nnx.initializers.truncated_normal(0.02)


class Layer(nnx.Module):
    """Attention and a small perceptron, each added to its input and normalized."""

    def __init__(self, task: BertTask, rngs: nnx.Rngs, dtype: Any) -> None:
        size = task.hidden_size
        dense = partial(nnx.Linear, dtype=dtype, kernel_init=_initial, rngs=rngs)
        norm = partial(nnx.LayerNorm, size, epsilon=1e-12, dtype=dtype, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(
            task.num_heads,
            size,
            dtype=dtype,
            kernel_init=_initial,
            decode=False,
            rngs=rngs,
        )
        self.attention_norm = norm()
        self.expand = dense(size, task.mlp_size)
        self.shrink = dense(task.mlp_size, size)
        self.output_norm = norm()

    def __call__(self, x: jax.Array, mask: jax.Array) -> jax.Array:
        """Returns new values of shape `(batch, length, hidden_size)`."""
        x = self.attention_norm(x + self.attention(x, mask=mask))
        hidden = nnx.gelu(self.expand(x), approximate=True)
        return self.output_norm(x + self.shrink(hidden))


class Bert(nnx.Module):
    """Embeddings, layers, pooler and classifier."""

    def __init__(self, task: BertTask, rngs: nnx.Rngs, dtype: Any) -> None:
        size = task.hidden_size
        embed = partial(
            nnx.Embed,
            features=size,
            dtype=dtype,
            embedding_init=_initial,
            rngs=rngs,
        )
        dense = partial(nnx.Linear, dtype=dtype, kernel_init=_initial, rngs=rngs)
        self.words = embed(task.vocabulary_size)
        self.positions = embed(task.sequence_length)
        self.types = embed(task.num_types)
        self.norm = nnx.LayerNorm(size, epsilon=1e-12, dtype=dtype, rngs=rngs)
        self.layers = nnx.List(
            [Layer(task, rngs, dtype) for _ in range(task.num_layers)]
        )
        self.pooler = dense(size, size)
        self.classifier = dense(size, task.num_classes)

    def __call__(self, batch: Batch) -> jax.Array:
        """Returns logits of shape `(batch, num_classes)`."""
        length = batch["word_ids"].shape[1]
        x = self.words(batch["word_ids"]) + self.types(batch["type_ids"])
        x = self.norm(x + self.positions(jnp.arange(length))[None])
        mask = (batch["mask"] > 0)[:, None, None, :]
        for layer in self.layers:
            x = layer(x, mask)
        return self.classifier(nnx.tanh(self.pooler(x[:, 0])))
