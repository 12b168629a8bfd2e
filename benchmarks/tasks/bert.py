"""BERT that classifies pairs of sentences, small and in the size of the tutorials."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.tasks._task import SEED, Task


@dataclass(frozen=True, kw_only=True)
class BertTask(Task):
    """An encoder with a pooler and two classes; batch 32, AdamW, no dropout.

    Layer norm comes after each residual sum, with epsilon 1e-12; GELU is the tanh
    approximation; the pooler is dense with tanh on the first token. `word_ids`,
    `mask` (1 for words, 0 for padding) and `type_ids` are int32 of shape
    `(batch, sequence_length)`.
    """

    batch_size: int = 32
    num_examples: int = 3_668
    num_classes: int = 2
    optimizer: str = "adamw"
    learning_rate: float = 1e-4
    weight_decay: float = 0.01
    num_layers: int = 4
    hidden_size: int = 256
    num_heads: int = 4
    mlp_size: int = 1024
    sequence_length: int = 128
    vocabulary_size: int = 30_522
    num_types: int = 2

    def make_arrays(self) -> dict[str, np.ndarray]:
        """Returns pairs of random sentences; half of the words tell the class."""
        random = np.random.default_rng(SEED)
        shape = (self.num_examples, self.sequence_length)
        position = np.arange(self.sequence_length)
        lengths = random.integers(self.sequence_length // 4, shape[1] + 1, shape[0])
        label = random.integers(0, self.num_classes, shape[0])
        words = random.integers(1, self.vocabulary_size, shape)
        # An even word becomes odd, or the other way round, until it fits the class.
        fits = (words % self.num_classes == label[:, None]) | (
            random.random(shape) < 0.5
        )
        shifted = words + (label[:, None] - words) % self.num_classes
        words = np.where(fits, words, np.minimum(shifted, self.vocabulary_size - 1))
        mask = position < lengths[:, None]
        types = (position >= lengths[:, None] // 2) & mask
        return {
            "word_ids": np.where(mask, words, 0).astype(np.int32),
            "mask": mask.astype(np.int32),
            "type_ids": types.astype(np.int32),
            "label": label.astype(np.int32),
        }

    @property
    def flops_per_step(self) -> float:
        """Layers, attention and the two heads, three times; look-ups are free."""
        hidden, length = self.hidden_size, self.sequence_length
        layer = length * (4 * hidden**2 + 2 * hidden * self.mlp_size)
        attention = 2 * length**2 * hidden
        heads = hidden * (hidden + self.num_classes)
        return 6.0 * self.batch_size * (self.num_layers * (layer + attention) + heads)

    def make_model(self, rngs: Any, dtype: Any) -> Any:
        """Returns the NNX module."""
        from benchmarks.models.bert import Bert

        return Bert(self, rngs, dtype)
