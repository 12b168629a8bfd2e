"""Four hundred tiny parameters: the cost of handling state."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.tasks._task import Task, make_images


@dataclass(frozen=True, kw_only=True)
class ManyLeavesTask(Task):
    """200 dense layers of 8 units with biases, batch 64, Adam.

    Each layer adds `0.1 * tanh(dense(x))` to its input `x`, and the last one's output
    is the logits. `image` is float32 of shape `(batch, width)`.
    """

    num_classes: int = 8
    num_layers: int = 200

    @property
    def width(self) -> int:
        """Units of each layer, as many as there are classes."""
        return self.num_classes

    def make_arrays(self) -> dict[str, np.ndarray]:
        """Returns flat images and classes."""
        return make_images(self, (self.width,))

    @property
    def flops_per_step(self) -> float:
        """All layers' matrix products, three times."""
        return 6.0 * self.batch_size * self.num_layers * self.width**2

    def make_model(self, rngs: Any, dtype: Any) -> Any:
        """Returns the NNX module."""
        from benchmarks.models.many_leaves import ManyLeaves

        return ManyLeaves(self, rngs, dtype)
