"""The model of task `mlp`."""

from typing import Any

import jax
from flax import nnx

from benchmarks.tasks._task import Batch
from benchmarks.tasks.mlp import MlpTask


class Mlp(nnx.Module):
    """Two dense layers."""

    def __init__(self, task: MlpTask, rngs: nnx.Rngs, dtype: Any) -> None:
        self.hidden = nnx.Linear(
            task.input_size, task.hidden_size, dtype=dtype, rngs=rngs
        )
        self.output = nnx.Linear(
            task.hidden_size, task.num_classes, dtype=dtype, rngs=rngs
        )

    def __call__(self, batch: Batch) -> jax.Array:
        """Returns logits of shape `(batch, num_classes)`."""
        return self.output(nnx.relu(self.hidden(batch["image"])))
