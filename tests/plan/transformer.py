"""A transformer that is divided over devices, as `armillary plan` takes it."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import PartitionSpec

import armillary

VOCABULARY, WIDTH, NUM_HEADS, NUM_LAYERS, LENGTH = 512, 128, 4, 2, 32
BATCH_SIZE = 16
RULES = {
    r"(query|key|value|up)/kernel": PartitionSpec("fsdp", "tensor"),
    r"(out|down)/kernel": PartitionSpec("tensor", "fsdp"),
}
cross_entropy = optax.softmax_cross_entropy_with_integer_labels


class Layer(nnx.Module):
    """Attention, and a network on each position."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.first, self.second = (nnx.LayerNorm(WIDTH, rngs=rngs) for _ in range(2))
        self.query, self.key, self.value, self.out = (
            nnx.Linear(WIDTH, WIDTH, rngs=rngs) for _ in range(4)
        )
        self.up = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        y = self.first(x)
        heads = [
            part(y).reshape(*y.shape[:2], NUM_HEADS, -1)
            for part in (self.query, self.key, self.value)
        ]
        attended = jax.nn.dot_product_attention(*heads, is_causal=True)
        x = x + self.out(attended.reshape(y.shape))
        return x + self.down(nnx.gelu(self.up(self.second(x))))


class Transformer(nnx.Module):
    """Says what comes next."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Embed(VOCABULARY, WIDTH, rngs=rngs)
        self.layers = nnx.List(Layer(rngs) for _ in range(NUM_LAYERS))
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)

    def __call__(self, words: jax.Array) -> jax.Array:
        x = self.embed(words)
        for layer in self.layers:
            x = layer(x)
        return self.embed.attend(self.norm(x))


class Trainer(armillary.StandardTrainer):
    def __init__(self, strategy: Any) -> None:
        rng = np.random.default_rng(0)
        words = rng.integers(VOCABULARY, size=(2 * BATCH_SIZE, LENGTH + 1))
        source = armillary.data.from_arrays(
            {"words": words.astype(np.int32)}, batch_size=BATCH_SIZE, repeat=True
        )
        super().__init__(strategy.distribute_dataset(source))
        self.strategy, self.model = strategy, Transformer(nnx.Rngs(0))
        self.optimizer = nnx.Optimizer(self.model, optax.adamw(1e-3), wrt=nnx.Param)

    def train_step(self, iterator: Any) -> None:
        self.strategy.run(self.improve, args=(next(iterator)["words"],))

    def improve(self, words: jax.Array) -> None:
        def loss_fn(model: Transformer) -> jax.Array:
            losses = cross_entropy(model(words[:, :-1]), words[:, 1:])
            return armillary.compute_average_loss(jnp.mean(losses, axis=1))

        self.optimizer.update(
            self.model, armillary.all_reduce("sum", nnx.grad(loss_fn)(self.model))
        )


def make_trainer(mesh_shape: dict[str, int]) -> Trainer:
    count = int(np.prod(list(mesh_shape.values())))
    devices = jax.devices("cpu")[:count]
    strategy = armillary.ShardedStrategy(mesh_shape, rules=RULES, devices=devices)
    return Trainer(strategy)
