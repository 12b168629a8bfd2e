"""The model of task `cnn`."""

from typing import Any

import jax
from flax import nnx

from benchmarks.tasks._task import Batch
from benchmarks.tasks.cnn import CnnTask


class Cnn(nnx.Module):
    """Two convolutions with pools, and two dense layers."""

    def __init__(self, task: CnnTask, rngs: nnx.Rngs, dtype: Any) -> None:
        first, second = task.channels
        self.conv1 = nnx.Conv(1, first, (3, 3), dtype=dtype, rngs=rngs)
        self.conv2 = nnx.Conv(first, second, (3, 3), dtype=dtype, rngs=rngs)
        self.dense1 = nnx.Linear(
            task.flat_size, task.hidden_size, dtype=dtype, rngs=rngs
        )
        self.dense2 = nnx.Linear(
            task.hidden_size, task.num_classes, dtype=dtype, rngs=rngs
        )

    def __call__(self, batch: Batch) -> jax.Array:
        """Returns logits of shape `(batch, num_classes)`."""
        x = nnx.max_pool(nnx.relu(self.conv1(batch["image"])), (2, 2), strides=(2, 2))
        x = nnx.max_pool(nnx.relu(self.conv2(x)), (2, 2), strides=(2, 2))
        return self.dense2(nnx.relu(self.dense1(x.reshape(x.shape[0], -1))))
