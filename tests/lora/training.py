"""A trainer of adapters, whose base stays out of its checkpoints."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import armillary

WIDTH = 64
DEPTH = 3


class Network(nnx.Module):
    """A scanned stack of layers between two others, with a fixed dropout."""

    def __init__(self, width: int = WIDTH, depth: int = DEPTH, seed: int = 0) -> None:
        rngs = nnx.Rngs(seed)
        self.first = nnx.Linear(16, width, rngs=rngs)
        make = nnx.vmap(lambda rngs: nnx.Linear(width, width, rngs=rngs))
        self.layers = nnx.split_rngs(splits=depth)(make)(rngs)
        self.last = nnx.Linear(width, 4, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=nnx.Rngs(9))

    def __call__(self, x: jax.Array) -> jax.Array:
        def apply(x: jax.Array, layer: nnx.Linear) -> jax.Array:
            return x + jnp.tanh(layer(x))

        run = nnx.scan(apply, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        return self.last(run(self.first(x), self.layers))


def make_model(rank: int = 4, seed: int = 0, **sizes: Any) -> Network:
    model = Network(seed=seed, **sizes)
    armillary.lora.add(model, rank=rank, where="kernel", rngs=nnx.Rngs(1))
    return model


class Trainer(armillary.StandardTrainer):
    """Trains only adapters."""

    def __init__(self, strategy: Any, seed: int = 0, **sizes: Any) -> None:
        rng = np.random.default_rng(0)
        rows = {
            "x": rng.normal(size=(40, 16)).astype("float32"),
            "label": rng.integers(0, 4, 40).astype("int32"),
        }
        source = armillary.data.from_arrays(
            rows, batch_size=8, shuffle_seed=0, repeat=True
        )
        super().__init__(strategy.distribute_dataset(source))
        self.strategy = strategy
        self.model = strategy.make(make_model, seed=seed, **sizes)
        self.optimizer = strategy.make(
            nnx.Optimizer, self.model, optax.adam(0.02), wrt=nnx.LoRAParam
        )
        self.loss = jnp.zeros(())

    def train_step(self, iterator: Any) -> None:
        def step_fn(batch: Any) -> jax.Array:
            def loss_fn(model: Network) -> jax.Array:
                losses = optax.softmax_cross_entropy_with_integer_labels(
                    model(batch["x"]), batch["label"]
                )
                return jnp.mean(losses)

            adapters = nnx.DiffState(0, nnx.LoRAParam)
            grad_fn = nnx.value_and_grad(loss_fn, argnums=adapters)
            loss, gradients = grad_fn(self.model)
            gradients = armillary.all_reduce("mean", gradients)
            self.optimizer.update(self.model, gradients)
            return armillary.all_reduce("mean", loss)

        loss = self.strategy.run(step_fn, args=(next(iterator),))
        self.loss = self.strategy.reduce("mean", loss)

    def train_loop_end(self) -> armillary.typing.Output:
        return {"loss": self.loss}


def make_manager(trainer: Trainer, folder: Path | str) -> armillary.CheckpointManager:
    checkpoint = armillary.Checkpoint(
        trainer=trainer, leave_out=armillary.lora.base(trainer.model)
    )
    return armillary.CheckpointManager(
        checkpoint, folder, step_counter=trainer.optimizer.step
    )
