"""The model of task `many-leaves`."""

from typing import Any

import jax
from flax import nnx

from benchmarks.tasks._task import Batch
from benchmarks.tasks.many_leaves import ManyLeavesTask


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
