"""Two dense layers on flat images: all overhead, hardly any arithmetic."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.tasks._task import Task, make_images


@dataclass(frozen=True, kw_only=True)
class MlpTask(Task):
    """784-64-10 with a ReLU between, batch 64, Adam.

    `image` is float32 of shape `(batch, input_size)`.
    """

    input_size: int = 784
    hidden_size: int = 64

    def make_arrays(self) -> dict[str, np.ndarray]:
        """Returns flat images and classes."""
        return make_images(self, (self.input_size,))

    @property
    def flops_per_step(self) -> float:
        """Both layers' matrix products, three times."""
        weights = self.hidden_size * (self.input_size + self.num_classes)
        return 6.0 * self.batch_size * weights

    def make_model(self, rngs: Any, dtype: Any) -> Any:
        """Returns the NNX module."""
        from benchmarks.models.mlp import Mlp

        return Mlp(self, rngs, dtype)
