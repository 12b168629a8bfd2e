"""The tasks: sizes, data and optimizers, for any framework.

This needs NumPy only, because peers read it in environments without JAX. The models are
in `benchmarks.models` and `benchmarks.peers`.
"""

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
        """Returns the examples, the same on each call; `label` holds the classes.

        A label is an integer for each example, or for each word of an example.
        """


@dataclass(frozen=True, kw_only=True)
class MlpTask(Task):
    """784-64-10 with a ReLU between: all overhead, hardly any arithmetic.

    Batch 64, Adam. `image` is float32 of shape `(batch, input_size)`.
    """

    input_size: int = 784
    hidden_size: int = 64

    def make_arrays(self) -> dict[str, np.ndarray]:
        """Returns flat images and classes."""
        return _make_images(self, (self.input_size,))


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
        return _make_images(self, (self.image_size, self.image_size, 1))


@dataclass(frozen=True, kw_only=True)
class ManyLeavesTask(Task):
    """Four hundred tiny parameters, for the cost of handling state.

    The model has 200 dense layers of 8 units with biases; batch 64, Adam. Each layer
    adds `0.1 * tanh(dense(x))` to its input `x`, and the output of the last layer is
    the logits. `image` is float32 of shape `(batch, width)`.
    """

    num_classes: int = 8
    num_layers: int = 200

    @property
    def width(self) -> int:
        """Units of each layer, as many as there are classes."""
        return self.num_classes

    def make_arrays(self) -> dict[str, np.ndarray]:
        """Returns flat images and classes."""
        return _make_images(self, (self.width,))


@dataclass(frozen=True, kw_only=True)
class BertTask(Task):
    """BERT that classifies pairs of sentences; batch 32, AdamW, no dropout.

    An encoder with a pooler and two classes. Layer norm comes after each residual sum,
    with epsilon 1e-12; GELU is the tanh approximation; the pooler is dense with tanh on
    the first token. `word_ids`, `mask` (1 for words, 0 for padding) and `type_ids` are
    int32 of shape `(batch, sequence_length)`.
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


@dataclass(frozen=True, kw_only=True)
class GptTask(Task):
    """A decoder that predicts the next word; batch 8, AdamW, no dropout.

    Layer norm comes before attention, before the perceptron and before the output; GELU
    is the tanh approximation; the output has parameters of its own. The classes are the
    words, and each word of a sequence has a label: the word that follows. `word_ids`
    and `label` are int32 of shape `(batch, sequence_length)`.
    """

    batch_size: int = 8
    num_examples: int = 4_096
    num_classes: int = 4_096
    optimizer: str = "adamw"
    learning_rate: float = 3e-4
    weight_decay: float = 0.01
    num_layers: int = 4
    hidden_size: int = 256
    num_heads: int = 4
    mlp_size: int = 1024
    sequence_length: int = 128

    def make_arrays(self) -> dict[str, np.ndarray]:
        """Returns random sentences; the word before tells three words of four."""
        random = np.random.default_rng(SEED)
        shape = (self.num_examples, self.sequence_length + 1)
        words = random.integers(0, self.num_classes, shape, np.int32)
        successors = random.permutation(self.num_classes).astype(np.int32)
        is_told = random.random(shape) < 0.75
        for position in range(1, shape[1]):
            told = successors[words[:, position - 1]]
            now = is_told[:, position]
            words[:, position] = np.where(now, told, words[:, position])
        return {"word_ids": words[:, :-1].copy(), "label": words[:, 1:].copy()}


TASKS = {
    "mlp": MlpTask,
    "cnn": CnnTask,
    "bert": BertTask,
    "bert-base": BertTask,
    "gpt": GptTask,
    "many-leaves": ManyLeavesTask,
}

_SMALL = {
    "mlp": {"hidden_size": 32, "num_examples": 200, "batch_size": 16},
    "cnn": {"image_size": 8, "num_examples": 100, "batch_size": 8},
    "bert": {
        "num_layers": 1,
        "hidden_size": 16,
        "num_heads": 2,
        "mlp_size": 32,
        "sequence_length": 12,
        "vocabulary_size": 50,
        "num_examples": 64,
        "batch_size": 8,
    },
    "gpt": {
        "num_layers": 1,
        "hidden_size": 16,
        "num_heads": 2,
        "mlp_size": 32,
        "sequence_length": 12,
        "num_classes": 20,
        "num_examples": 64,
    },
    "many-leaves": {"num_layers": 5, "num_examples": 200, "batch_size": 16},
}
_SMALL["bert-base"] = _SMALL["bert"]
_BERT_BASE = {"num_layers": 12, "hidden_size": 768, "num_heads": 12, "mlp_size": 3072}


def make_task(name: str, size: str = "full") -> Task:
    """Returns a task.

    Args:
        name: One of `TASKS`.
        size: `"full"`, or `"small"` for tests of the suite itself.
    """
    sizes = _SMALL[name] if size == "small" else {}
    if name == "bert-base" and size == "full":
        sizes = _BERT_BASE
    return TASKS[name](name=name, **sizes)


def _make_images(task: Task, shape: tuple[int, ...]) -> dict[str, np.ndarray]:
    """Returns random images whose classes a linear rule gives, so that loss falls.

    They are centered: if all pixels were positive, many a ReLU would be off for ever.
    """
    random = np.random.default_rng(SEED)
    images = random.random((task.num_examples, *shape), dtype=np.float32)
    images -= 0.5
    rule = random.standard_normal((int(np.prod(shape)), task.num_classes), np.float32)
    scores = images.reshape(task.num_examples, -1) @ rule
    return {"image": images, "label": np.argmax(scores, axis=1).astype(np.int32)}
