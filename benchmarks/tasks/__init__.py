"""What is trained: sizes, data and arithmetic, for any framework.

Modules here need NumPy only, because peers read them in environments without JAX.
`Task.make_model` alone imports the JAX model, from `benchmarks.models`.
"""

from benchmarks.protocol import SIZES
from benchmarks.tasks._task import Batch as Batch
from benchmarks.tasks._task import Task as Task
from benchmarks.tasks.bert import BertTask
from benchmarks.tasks.cnn import CnnTask
from benchmarks.tasks.many_leaves import ManyLeavesTask
from benchmarks.tasks.mlp import MlpTask

TASKS = {
    "mlp": MlpTask,
    "cnn": CnnTask,
    "bert": BertTask,
    "bert-base": BertTask,
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
    "many-leaves": {"num_layers": 5, "num_examples": 200, "batch_size": 16},
}
_SMALL["bert-base"] = _SMALL["bert"]
_BERT_BASE = {"num_layers": 12, "hidden_size": 768, "num_heads": 12, "mlp_size": 3072}


def make_task(name: str, size: str = "full") -> Task:
    """Returns a task.

    Args:
        name: One of `TASKS`.
        size: `"full"`, or `"small"` for tests of the suite itself.

    Raises:
        ValueError: If there is no such task or size.
    """
    if name not in TASKS:
        raise ValueError(
            f"`name` is {name!r}, but there is no such task. Use one of "
            f"{', '.join(TASKS)}."
        )
    if size not in SIZES:
        raise ValueError(f"`size` is {size!r}, but it must be one of {SIZES}.")
    sizes = _SMALL[name] if size == "small" else {}
    if name == "bert-base" and size == "full":
        sizes = _BERT_BASE
    return TASKS[name](name=name, **sizes)
