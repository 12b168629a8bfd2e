"""The tasks' models in Flax NNX, from a batch to logits, as their users write them."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from benchmarks.tasks import (
    Batch,
    BertTask,
    CnnTask,
    GptTask,
    ManyLeavesTask,
    MlpTask,
    Task,
)

_initial = nnx.initializers.truncated_normal(0.02)


def make_model(task: Task, rngs: nnx.Rngs, dtype: Any) -> Any:
    """Returns an NNX module, a function from a batch to its logits.

    Args:
        task: The task of the model.
        rngs: Random numbers for the initial parameters, which are float32.
        dtype: The dtype of the computation.

    Raises:
        TypeError: If there is no model of this task.
    """
    match task:
        case MlpTask():
            return Mlp(task, rngs, dtype)
        case CnnTask():
            return Cnn(task, rngs, dtype)
        case BertTask():
            return Bert(task, rngs, dtype)
        case GptTask():
            return Gpt(task, rngs, dtype)
        case ManyLeavesTask():
            return ManyLeaves(task, rngs, dtype)
    raise TypeError(
        f"`task` is a {type(task).__name__}, but there is no model of it. Add one to "
        "`benchmarks/models.py`."
    )


class Mlp(nnx.Module):
    """Two dense layers."""

    def __init__(self, task: MlpTask, rngs: nnx.Rngs, dtype: Any) -> None:
        linear = partial(nnx.Linear, dtype=dtype, rngs=rngs)
        self.hidden = linear(task.input_size, task.hidden_size)
        self.output = linear(task.hidden_size, task.num_classes)

    def __call__(self, batch: Batch) -> jax.Array:
        """Returns logits of shape `(batch, num_classes)`."""
        return self.output(nnx.relu(self.hidden(batch["image"])))


class Cnn(nnx.Module):
    """Two convolutions with pools, and two dense layers."""

    def __init__(self, task: CnnTask, rngs: nnx.Rngs, dtype: Any) -> None:
        linear = partial(nnx.Linear, dtype=dtype, rngs=rngs)
        first, second = task.channels
        self.conv1 = nnx.Conv(1, first, (3, 3), dtype=dtype, rngs=rngs)
        self.conv2 = nnx.Conv(first, second, (3, 3), dtype=dtype, rngs=rngs)
        self.dense1 = linear(task.flat_size, task.hidden_size)
        self.dense2 = linear(task.hidden_size, task.num_classes)

    def __call__(self, batch: Batch) -> jax.Array:
        """Returns logits of shape `(batch, num_classes)`."""
        x = nnx.max_pool(nnx.relu(self.conv1(batch["image"])), (2, 2), strides=(2, 2))
        x = nnx.max_pool(nnx.relu(self.conv2(x)), (2, 2), strides=(2, 2))
        return self.dense2(nnx.relu(self.dense1(x.reshape(x.shape[0], -1))))


class ManyLeaves(nnx.Module):
    """Many tiny dense layers, each with a residual connection."""

    def __init__(self, task: ManyLeavesTask, rngs: nnx.Rngs, dtype: Any) -> None:
        self.layers = nnx.List(
            [
                nnx.Linear(task.width, task.width, dtype=dtype, rngs=rngs)
                for _ in range(task.num_layers)
            ]
        )

    def __call__(self, batch: Batch) -> jax.Array:
        """Returns logits of shape `(batch, num_classes)`."""
        x = batch["image"]
        for layer in self.layers:
            x = x + 0.1 * nnx.tanh(layer(x))
        return x


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


class GptLayer(nnx.Module):
    """Attention to earlier words and a small perceptron, each after its own norm."""

    def __init__(self, task: GptTask, rngs: nnx.Rngs, dtype: Any) -> None:
        size = task.hidden_size
        dense = partial(nnx.Linear, dtype=dtype, kernel_init=_initial, rngs=rngs)
        norm = partial(nnx.LayerNorm, size, epsilon=1e-5, dtype=dtype, rngs=rngs)
        self.attention_norm = norm()
        self.attention = nnx.MultiHeadAttention(
            task.num_heads,
            size,
            dtype=dtype,
            kernel_init=_initial,
            decode=False,
            rngs=rngs,
        )
        self.mlp_norm = norm()
        self.expand = dense(size, task.mlp_size)
        self.shrink = dense(task.mlp_size, size)

    def __call__(self, x: jax.Array, mask: jax.Array) -> jax.Array:
        """Returns new values of shape `(batch, length, hidden_size)`."""
        x = x + self.attention(self.attention_norm(x), mask=mask)
        hidden = nnx.gelu(self.expand(self.mlp_norm(x)), approximate=True)
        return x + self.shrink(hidden)


class Gpt(nnx.Module):
    """Embeddings, layers, a norm and an output for each word."""

    def __init__(self, task: GptTask, rngs: nnx.Rngs, dtype: Any) -> None:
        size = task.hidden_size
        embed = partial(
            nnx.Embed, features=size, dtype=dtype, embedding_init=_initial, rngs=rngs
        )
        self.words = embed(task.num_classes)
        self.positions = embed(task.sequence_length)
        self.layers = nnx.List(
            [GptLayer(task, rngs, dtype) for _ in range(task.num_layers)]
        )
        self.norm = nnx.LayerNorm(size, epsilon=1e-5, dtype=dtype, rngs=rngs)
        self.output = nnx.Linear(
            size, task.num_classes, dtype=dtype, kernel_init=_initial, rngs=rngs
        )

    def __call__(self, batch: Batch) -> jax.Array:
        """Returns logits of shape `(batch, length, num_classes)`."""
        length = batch["word_ids"].shape[1]
        positions = jnp.arange(length)
        x = self.words(batch["word_ids"]) + self.positions(positions)[None]
        mask = (positions[:, None] >= positions[None, :])[None, None]
        for layer in self.layers:
            x = layer(x, mask)
        return self.output(self.norm(x))
