"""Models of shapes alone, as programs for `armillary plan`."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import armillary

WIDTH = 64
BATCH_SIZE = 16


class Block(nnx.Module):
    """A layer with a shortcut."""

    def __init__(self, width: int, rngs: nnx.Rngs) -> None:
        self.up = nnx.Linear(width, 4 * width, dtype=jnp.bfloat16, rngs=rngs)
        self.down = nnx.Linear(4 * width, width, dtype=jnp.bfloat16, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + self.down(nnx.gelu(self.up(x)))


class Model(nnx.Module):
    """Layers in a loop, which the backward pass computes again."""

    def __init__(self, width: int, num_layers: int, rngs: nnx.Rngs) -> None:
        @nnx.split_rngs(splits=num_layers)
        @nnx.vmap(in_axes=0, out_axes=0)
        def make_blocks(rngs: nnx.Rngs) -> Block:
            return Block(width, rngs)

        self.blocks = make_blocks(rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
        @nnx.remat
        def apply(block: Block, x: jax.Array) -> jax.Array:
            return block(x)

        return apply(self.blocks, x)


def make_state(width: int = WIDTH, num_layers: int = 4) -> tuple[Model, nnx.Optimizer]:
    model = Model(width, num_layers, nnx.Rngs(0))
    return model, nnx.Optimizer(model, optax.adamw(1e-3), wrt=nnx.Param)


class Trainer(armillary.StandardTrainer):
    """Learns to return its input."""

    def __init__(
        self, strategy: Any, model: Model, optimizer: nnx.Optimizer, width: int = WIDTH
    ) -> None:
        rows = np.ones((BATCH_SIZE, width), np.float32)
        source = armillary.data.from_arrays({"x": rows}, batch_size=BATCH_SIZE)
        super().__init__(source)
        self.strategy = strategy
        self.model, self.optimizer = model, optimizer

    def train_step(self, iterator: Any) -> None:
        def step_fn(batch: Any) -> None:
            def loss_fn(batch: Any) -> jax.Array:
                return ((self.model(batch["x"]) - batch["x"]) ** 2).mean()

            _, gradients = armillary.value_and_grad(
                loss_fn, self.model, batch=batch, op="mean"
            )
            gradients = armillary.all_reduce("mean", gradients)
            self.optimizer.update(self.model, gradients)

        self.strategy.run(step_fn, args=(next(iterator),))


def make_trainer(**options: Any) -> Trainer:
    strategy = armillary.ShardedStrategy({"data": 2, "fsdp": 4}, **options)
    return Trainer(strategy, *strategy.make(make_state))


def make_controller() -> armillary.Controller:
    """A program that reads its global step, and needs more devices than one."""
    trainer = make_trainer()
    return armillary.Controller(
        trainer=trainer,
        global_step=trainer.optimizer.step,
        strategy=trainer.strategy,
        steps_per_loop=5,
    )


def make_huge_trainer() -> Trainer:
    """A model of 137 billion parameters, which fits on no test machine."""
    strategy = armillary.ShardedStrategy({"data": 2, "fsdp": 4})
    made = strategy.make(make_state, width=2**14, num_layers=64)
    return Trainer(strategy, *made, width=2**14)
