"""A decoder of 70 billion parameters, to be planned: `armillary plan` runs it as it is.

It has the sizes of Llama 3 70B. Its layers are a loop, and the backward pass computes
them again::

    armillary plan tests/plan/decoder.py:make_trainer --topology h100:8x8
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import armillary

WIDTH, HIDDEN, NUM_LAYERS, VOCABULARY = 8192, 28672, 80, 128256
NUM_HEADS, NUM_KEY_HEADS, LENGTH = 64, 8, 4096
HEAD = WIDTH // NUM_HEADS
BATCH_SIZE = 64


def make_linear(inputs: int, outputs: int, rngs: nnx.Rngs) -> nnx.Linear:
    return nnx.Linear(inputs, outputs, use_bias=False, dtype=jnp.bfloat16, rngs=rngs)


def make_norm(rngs: nnx.Rngs) -> nnx.RMSNorm:
    return nnx.RMSNorm(WIDTH, dtype=jnp.bfloat16, rngs=rngs)


class Block(nnx.Module):
    """Attention with groups of queries, and a gated network on each position."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.first = make_norm(rngs)
        self.second = make_norm(rngs)
        self.query = make_linear(WIDTH, WIDTH, rngs)
        self.key = make_linear(WIDTH, NUM_KEY_HEADS * HEAD, rngs)
        self.value = make_linear(WIDTH, NUM_KEY_HEADS * HEAD, rngs)
        self.out = make_linear(WIDTH, WIDTH, rngs)
        self.gate = make_linear(WIDTH, HIDDEN, rngs)
        self.up = make_linear(WIDTH, HIDDEN, rngs)
        self.down = make_linear(HIDDEN, WIDTH, rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        y = self.first(x)
        query, key, value = (
            part(y).reshape(*x.shape[:2], -1, HEAD)
            for part in (self.query, self.key, self.value)
        )
        attended = jax.nn.dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(attended.reshape(x.shape))
        y = self.second(x)
        return x + self.down(nnx.silu(self.gate(y)) * self.up(y))


class Decoder(nnx.Module):
    """Predicts the next token."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        @nnx.split_rngs(splits=NUM_LAYERS)
        @nnx.vmap(in_axes=0, out_axes=0)
        def make_blocks(rngs: nnx.Rngs) -> Block:
            return Block(rngs)

        self.embed = nnx.Embed(VOCABULARY, WIDTH, dtype=jnp.bfloat16, rngs=rngs)
        self.blocks = make_blocks(rngs)
        self.norm = make_norm(rngs)
        self.head = make_linear(WIDTH, VOCABULARY, rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
        @nnx.remat
        def apply(block: Block, x: jax.Array) -> jax.Array:
            return block(x)

        x = apply(self.blocks, self.embed(tokens))
        return self.head(self.norm(x)).astype(jnp.float32)


def make_state() -> tuple[Decoder, nnx.Optimizer]:
    model = Decoder(nnx.Rngs(0))
    return model, nnx.Optimizer(model, optax.adamw(1e-4), wrt=nnx.Param)


class Trainer(armillary.StandardTrainer):
    """Trains on sequences of tokens."""

    def __init__(self, strategy: Any) -> None:
        tokens = np.zeros((BATCH_SIZE, LENGTH + 1), np.int32)
        source = armillary.data.from_arrays({"tokens": tokens}, batch_size=BATCH_SIZE)
        super().__init__(source)
        self.strategy = strategy
        self.model, self.optimizer = strategy.make(make_state)

    def train_step(self, iterator: Any) -> None:
        def step_fn(batch: Any) -> None:
            def loss_fn(batch: Any) -> jax.Array:
                tokens = batch["tokens"]
                losses = optax.softmax_cross_entropy_with_integer_labels(
                    self.model(tokens[:, :-1]), tokens[:, 1:]
                )
                return losses.mean()

            _, gradients = armillary.value_and_grad(
                loss_fn, self.model, batch=batch, op="mean"
            )
            gradients = armillary.all_reduce("mean", gradients)
            self.optimizer.update(self.model, gradients)

        self.strategy.run(step_fn, args=(next(iterator),))


def make_trainer() -> Trainer:
    return Trainer(armillary.ShardedStrategy({"fsdp": 64}))
