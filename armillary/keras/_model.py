"""What a trainer and an evaluator ask of a compiled Keras model."""

from typing import Any

import jax
import numpy as np

from armillary.data._dataset import DistributedDataset
from armillary.distribute.replica._context import get_strategy
from armillary.keras._backend import import_keras
from armillary.keras._scaling import scaled_for_replicas
from armillary.typing import Batch


def check_compiled(model: Any) -> None:
    """Raises if `model` is not a compiled Keras model."""
    keras = import_keras()
    if not isinstance(model, keras.Model):
        raise TypeError(
            f"`model` is {model!r:.60} of type {type(model).__name__}, but it must be "
            "a `keras.Model`. For anything else derive from `armillary.StandardTrainer`"
            " or `armillary.StandardEvaluator`."
        )
    if not model.compiled:
        raise ValueError(
            f"`model` ({model.name}) is not compiled, so it has no loss. Call "
            "`model.compile(optimizer=..., loss=..., metrics=[...])` before."
        )
    for name in ("train_step", "test_step"):
        if getattr(type(model), name) is not getattr(keras.Model, name):
            raise TypeError(
                f"`model` of type {type(model).__name__} has a `{name}` of its own, "
                "which would not be called. Write it as `train_step` of an "
                "`armillary.StandardTrainer` (or `eval_step` of a "
                "`StandardEvaluator`)."
            )


def distribute(dataset: Any) -> DistributedDataset:
    """Returns a dataset for the strategy in effect, if it is for none yet."""
    if isinstance(dataset, DistributedDataset):
        return dataset
    return get_strategy().distribute_dataset(dataset)


def build(model: Any, dataset: DistributedDataset) -> None:
    """Makes all variables of a model, its optimizer and its metrics.

    They must be there before a checkpoint is restored into them.
    """
    keras = import_keras()
    spec = jax.tree.map(
        lambda leaf: keras.KerasTensor(leaf.shape, np.dtype(leaf.dtype).name),
        dataset.element_spec,
    )
    model._symbolic_build(data_batch=spec)


def compute_loss(
    model: Any, batch: Batch, num_replicas: int, *, training: bool
) -> tuple[jax.Array, int]:
    """Calls a model, and updates its metrics but for that of the loss."""
    with scaled_for_replicas(num_replicas):
        x, y, weights = import_keras().utils.unpack_x_y_sample_weight(batch)
        options = {"training": training} if model._call_has_training_arg else {}
        predictions = model(x, **options)
        loss = model._compute_loss(x, y, predictions, weights, training=training)
        model.compute_metrics(x, y, predictions, weights)
        return loss, jax.tree.leaves(x)[0].shape[0]


def track_loss(
    model: Any, loss: jax.Array, num_examples: int, num_replicas: int
) -> None:
    """Updates the metric of the loss with what `compute_loss` returned."""
    model._loss_tracker.update_state(loss * num_replicas, sample_weight=num_examples)
