"""The tasks' models in PyTorch, as its users write them, from batches to logits.

`torch` is an argument, so that this module can be read where PyTorch is absent.
"""

from functools import partial
from typing import Any

from benchmarks.tasks import Batch, BertTask, CnnTask, MlpTask, Task


def make_model(torch: Any, task: Task) -> Any:
    """Returns a model, its weights as the task starts them.

    Args:
        torch: The module `torch`.
        task: The task of the model.

    Raises:
        TypeError: If there is no model of this task.
    """
    match task:
        case MlpTask():
            return _make_on_images(torch, _make_mlp(torch, task))
        case CnnTask():
            model = _make_on_images(torch, _make_cnn(torch, task))
            return model.to(memory_format=torch.channels_last)
        case BertTask():
            return _make_bert(torch, task)
    raise TypeError(
        f"`task` is a {type(task).__name__}, but there is no PyTorch model of it. Add "
        "one to `benchmarks/peers/_torch_models.py`."
    )


def _make_on_images(torch: Any, layers: Any) -> Any:
    class OnImages(torch.nn.Module):
        """Gives a batch's images to layers."""

        def __init__(self) -> None:
            super().__init__()
            self.layers = layers

        def forward(self, batch: Batch) -> Any:
            return self.layers(batch["image"])

    return OnImages()


def _make_mlp(torch: Any, task: MlpTask) -> Any:
    nn = torch.nn
    return nn.Sequential(
        _start(nn, nn.Linear(task.input_size, task.hidden_size)),
        nn.ReLU(),
        _start(nn, nn.Linear(task.hidden_size, task.num_classes)),
    )


def _make_cnn(torch: Any, task: CnnTask) -> Any:
    nn = torch.nn
    first, second = task.channels
    return nn.Sequential(
        _start(nn, nn.Conv2d(1, first, 3, padding="same")),
        nn.ReLU(),
        nn.MaxPool2d(2),
        _start(nn, nn.Conv2d(first, second, 3, padding="same")),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        _start(nn, nn.Linear(task.flat_size, task.hidden_size)),
        nn.ReLU(),
        _start(nn, nn.Linear(task.hidden_size, task.num_classes)),
    )


def _start(nn: Any, layer: Any) -> Any:
    """Starts a layer as the JAX models do: variance one over the inputs, no bias."""
    nn.init.kaiming_normal_(layer.weight, nonlinearity="linear")
    nn.init.zeros_(layer.bias)
    return layer


def _make_bert(torch: Any, task: BertTask) -> Any:
    nn = torch.nn
    size = task.hidden_size

    class Bert(nn.Module):
        """Embeddings, layers, pooler and classifier."""

        def __init__(self) -> None:
            super().__init__()
            self.words = nn.Embedding(task.vocabulary_size, size)
            self.types = nn.Embedding(task.num_types, size)
            self.positions = nn.Parameter(torch.empty(task.sequence_length, size))
            self.norm = nn.LayerNorm(size, eps=1e-12)
            layer = nn.TransformerEncoderLayer(
                size,
                task.num_heads,
                task.mlp_size,
                dropout=0.0,
                activation=partial(nn.functional.gelu, approximate="tanh"),
                layer_norm_eps=1e-12,
                batch_first=True,
            )
            self.layers = nn.TransformerEncoder(
                layer, task.num_layers, enable_nested_tensor=False
            )
            self.pooler = nn.Linear(size, size)
            self.classifier = nn.Linear(size, task.num_classes)
            for name, parameter in self.named_parameters():
                if parameter.ndim > 1:
                    nn.init.trunc_normal_(parameter, std=0.02, a=-0.04, b=0.04)
                elif name.endswith("bias"):
                    nn.init.zeros_(parameter)

        def forward(self, batch: Batch) -> Any:
            x = self.words(batch["word_ids"]) + self.types(batch["type_ids"])
            x = self.norm(x + self.positions)
            x = self.layers(x, src_key_padding_mask=batch["mask"] == 0)
            return self.classifier(torch.tanh(self.pooler(x[:, 0])))

    return Bert()
