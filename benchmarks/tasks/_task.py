"""What every task has."""

import abc
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

Batch: TypeAlias = dict[str, Any]

SEED = 0


@dataclass(frozen=True, kw_only=True)
class Task(abc.ABC):
    """A classifier, its data and its optimizer; the loss is the mean cross entropy.

    Attributes:
        name: Its name on the command line.
        batch_size: Examples in one step, over all devices.
        num_examples: Examples in one epoch; every epoch has an order of its own.
        num_classes: Classes, the size of the logits.
        optimizer: `"adam"` or `"adamw"`, with the usual 0.9, 0.999 and 1e-8, or
            `"sgd"`.
        learning_rate: The learning rate, constant.
        weight_decay: Decoupled weight decay of all parameters, for `"adamw"`.
    """

    name: str
    batch_size: int = 64
    num_examples: int = 60_000
    num_classes: int = 10
    optimizer: str = "adam"
    learning_rate: float = 1e-3
    weight_decay: float = 0.0

    @abc.abstractmethod
    def make_arrays(self) -> dict[str, np.ndarray]:
        """Returns the examples, the same on each call; `label` holds the classes."""

    @property
    @abc.abstractmethod
    def flops_per_step(self) -> float:
        """Arithmetic of one step: three times the forward pass's matrix products."""

    @abc.abstractmethod
    def make_model(self, rngs: Any, dtype: Any) -> Any:
        """Returns an NNX module, a function from a batch to its logits.

        Args:
            rngs: The `nnx.Rngs` of the initial parameters, which are float32.
            dtype: What it computes in.
        """


def make_images(task: Task, shape: tuple[int, ...]) -> dict[str, np.ndarray]:
    """Returns random images whose classes a linear rule gives, so that loss falls.

    They are centered: if all pixels were positive, many a ReLU would be off for ever.
    """
    random = np.random.default_rng(SEED)
    images = random.random((task.num_examples, *shape), dtype=np.float32)
    images -= 0.5
    rule = random.standard_normal((int(np.prod(shape)), task.num_classes), np.float32)
    scores = images.reshape(task.num_examples, -1) @ rule
    return {"image": images, "label": np.argmax(scores, axis=1).astype(np.int32)}
