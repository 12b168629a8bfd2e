"""Two convolutions and two dense layers on images of 28 by 28 pixels."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.tasks._task import Task, make_images


@dataclass(frozen=True, kw_only=True)
class CnnTask(Task):
    """The convolutional network of the custom training loop tutorials; batch 64, Adam.

    Convolution 3x3 to 32 channels, ReLU, 2x2 max pool; convolution 3x3 to 64, ReLU, 2x2
    max pool; dense 64, ReLU, dense 10. Convolutions keep the size (`"SAME"`). `image`
    is float32 of shape `(batch, image_size, image_size, 1)`.
    """

    image_size: int = 28
    channels: tuple[int, int] = (32, 64)
    hidden_size: int = 64

    @property
    def flat_size(self) -> int:
        """Values of one example after the second pool."""
        return (self.image_size // 4) ** 2 * self.channels[1]

    def make_arrays(self) -> dict[str, np.ndarray]:
        """Returns images and classes."""
        return make_images(self, (self.image_size, self.image_size, 1))

    @property
    def flops_per_step(self) -> float:
        """Convolutions and dense layers, three times."""
        first, second = self.channels
        pixels = self.image_size**2
        products = (
            pixels * 9 * first
            + (pixels // 4) * 9 * first * second
            + self.hidden_size * (self.flat_size + self.num_classes)
        )
        return 6.0 * self.batch_size * products

    def make_model(self, rngs: Any, dtype: Any) -> Any:
        """Returns the NNX module."""
        from benchmarks.models.cnn import Cnn

        return Cnn(self, rngs, dtype)
