"""The training loop and the evaluation of a compiled Keras model.

A loss object may average over its examples, sum them, or neither, and this is known
only to the object. So Keras calls two functions of its own that scale each mean, and a
third one that scales the losses of layers. By themselves they scale only under
TensorFlow. Inside `scaled_for_replicas` they scale under JAX too.
"""

import contextlib
import contextvars
import functools
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from armillary._optional import import_keras
from armillary.data._dataset import DistributedDataset
from armillary.distribute._global_arrays import as_local
from armillary.distribute.replica._context import get_strategy, require_replica_context
from armillary.distribute.replica._gradient import value_and_grad
from armillary.distribute.replica._reductions import all_reduce
from armillary.keras._values import check_backend, set_value, value_of
from armillary.keras._variables import answer_names
from armillary.state._slots import Trait, with_trait
from armillary.trainer._hook_code import without_python
from armillary.trainer._options import StandardEvaluatorOptions, StandardTrainerOptions
from armillary.trainer._standard_evaluator import StandardEvaluator
from armillary.trainer._standard_trainer import StandardTrainer
from armillary.typing import Batch, Output

_num_replicas = contextvars.ContextVar("num_replicas", default=1)


@contextlib.contextmanager
def scaled_for_replicas(num_replicas: int) -> Iterator[None]:
    """Scales a model's losses so that the sum over replicas is the batch's loss."""
    _install()
    token = _num_replicas.set(num_replicas)
    try:
        yield
    finally:
        _num_replicas.reset(token)


def _scale(value: jax.Array) -> jax.Array:
    """Divides a mean by the number of replicas, in place of Keras' own function."""
    num_replicas = _num_replicas.get()
    return value / num_replicas if num_replicas > 1 else value


def _unscale(value: jax.Array) -> jax.Array:
    num_replicas = _num_replicas.get()
    return value * num_replicas if num_replicas > 1 else value


@functools.cache
def _install() -> None:
    from keras.src.losses import loss as keras_loss
    from keras.src.trainers.trainer import Trainer

    aggregate: Any = Trainer._aggregate_additional_loss

    @functools.wraps(aggregate)
    def aggregate_and_scale(self: Any, loss: Any) -> Any:
        return _scale(aggregate(self, loss))

    keras_loss.scale_loss_for_distribution = _scale
    keras_loss.unscale_loss_for_distribution = _unscale
    Trainer._aggregate_additional_loss = aggregate_and_scale


def prepare(model: Any, dataset: Any) -> DistributedDataset:
    """Makes all variables of a model, so that they can be restored.

    Returns:
        The dataset, distributed by the strategy in effect.
    """
    keras = import_keras()
    check_backend()
    answer_names()
    if not isinstance(model, keras.Model):
        raise TypeError(
            f"`model` is {model!r:.60} of type {type(model).__name__}, but it must be "
            "a `keras.Model`. For anything else derive from `armillary.StandardTrainer`"
            " or `armillary.StandardEvaluator`."
        )
    if not model.compiled:
        raise ValueError(
            f"`model` ({model.name}) is not compiled, so it has no loss. Call "
            "`model.compile(optimizer=..., loss=..., metrics=[...])` first."
        )
    # A step of the model's own would not be called, which nobody would notice.
    for name in ("train_step", "test_step"):
        if getattr(type(model), name) is not getattr(keras.Model, name):
            raise TypeError(
                f"`model` of type {type(model).__name__} has a `{name}` of its own, "
                "which would not be called. Write it as the `train_step` of an "
                "`armillary.StandardTrainer` (or `eval_step` of a "
                "`StandardEvaluator`)."
            )

    if not isinstance(dataset, DistributedDataset):
        dataset = get_strategy().distribute_dataset(dataset)
    model._symbolic_build(data_batch=as_keras_tensors(dataset.element_spec))
    return dataset


def as_keras_tensors(spec: Any) -> Any:
    """Returns the types of a batch in a form from which Keras builds a model."""
    import keras

    def as_tensor(leaf: Any) -> Any:
        return keras.KerasTensor(leaf.shape, np.dtype(leaf.dtype).name)

    return jax.tree.map(as_tensor, spec)


def compute_loss(model: Any, batch: Batch, *, training: bool) -> jax.Array:
    """Calls a model, in replica context, and updates its metrics."""
    import keras

    context = require_replica_context("a Keras model", "")
    num_replicas = context.num_replicas_in_sync
    with scaled_for_replicas(num_replicas):
        x, y, weights = keras.utils.unpack_x_y_sample_weight(batch)
        options = {"training": training} if model._call_has_training_arg else {}
        predictions = model(x, **options)
        loss = model._compute_loss(x, y, predictions, weights, training=training)
        model.compute_metrics(x, y, predictions, weights)
    # The losses of replicas add up, but the metric averages them.
    num_examples = jax.tree.leaves(x)[0].shape[0]
    model._loss_tracker.update_state(loss * num_replicas, sample_weight=num_examples)
    return loss


@contextlib.contextmanager
def _averaged_weights(model: Any) -> Iterator[None]:
    """Puts the averages of `use_ema` into a model, and its own weights back."""
    optimizer = getattr(model, "optimizer", None)
    averages: Any = getattr(optimizer, "inner_optimizer", optimizer)
    has_averages = getattr(averages, "use_ema", False)
    if has_averages:
        # Before the first step the averages are zeros.
        has_averages = bool(as_local(value_of(averages.iterations)))
    if not has_averages:
        yield
        return

    variables = model.trainable_variables
    weights = [value_of(variable) for variable in variables]
    averages.finalize_variable_values(variables)
    try:
        yield
    finally:
        for variable, weight in zip(variables, weights, strict=True):
            set_value(variable, weight)


@with_trait(Trait.HOLDS_STATE)
class KerasEvaluator(StandardEvaluator):
    """Evaluates a compiled Keras model, as `model.evaluate` does, for a `Controller`.

    If the optimizer averages the weights (`use_ema=True`), the averages are evaluated.
    `model.fit` leaves the same averages in the model when it ends. Every example counts
    once, whatever the batch size and the number of replicas. The evaluator raises the
    same errors as `KerasTrainer`, and a `TypeError` for a `test_step` of the model's
    own.

    Args:
        model: A model on which `compile` was called.
        eval_dataset: As the `train_dataset` of `KerasTrainer`.
        options: As for `StandardEvaluator`.
    """

    def __init__(
        self,
        model: Any,
        eval_dataset: Any,
        options: StandardEvaluatorOptions | None = None,
    ) -> None:
        super().__init__(prepare(model, eval_dataset), options)
        self.model = model

    def evaluate(self, num_steps: int) -> Output:
        """Evaluates the model, with the averages of its weights if there are any."""
        with _averaged_weights(self.model):
            return super().evaluate(num_steps)

    def eval_begin(self) -> None:
        """Resets the metrics of the model."""
        self.model.reset_metrics()

    def eval_step(self, iterator: Any) -> None:
        """Adds one batch to the metrics of the model."""
        add = functools.partial(compute_loss, self.model, training=False)
        get_strategy().run(add, args=(next(iterator),))

    def eval_end(self, *state: Any) -> Output:
        """Returns the loss and the metrics of the model."""
        del state
        return dict(self.model.get_metrics_result())


@with_trait(Trait.HOLDS_STATE)
class KerasTrainer(StandardTrainer):
    """Trains a compiled Keras model, as `model.fit` does, for a `Controller`.

    Each loop returns the loss and the metrics of the model. Layers with batch
    statistics use each replica's share of the batch. An optimizer with `use_ema=True`
    keeps its averages next to the weights. After training, put them into the model, as
    `model.fit` does when it ends, with
    `model.optimizer.finalize_variable_values(model.trainable_variables)`.

    Args:
        model: A model on which `compile` was called. `train_step` of a subclass is not
            called: derive from `StandardTrainer` for a step of your own.
        train_dataset: As for `StandardTrainer`. Batches are `(x, y)` or
            `(x, y, sample_weight)`. A dataset that is not distributed yet is
            distributed by the strategy in effect. The first batch is used to build the
            model.
        options: As for `StandardTrainer`.

    Raises:
        TypeError: If `model` is not a Keras model, or has a `train_step` of its own.
        ValueError: If `model` is not compiled, or there is no data.
    """

    def __init__(
        self,
        model: Any,
        train_dataset: Any,
        options: StandardTrainerOptions | None = None,
    ) -> None:
        super().__init__(prepare(model, train_dataset), options)
        self.model = model

    @without_python
    def train_loop_begin(self) -> None:
        """Resets the metrics of the model."""
        self.model.reset_metrics()

    def train_step(self, iterator: Any) -> None:
        """Makes one update of the model."""
        get_strategy().run(self._update, args=(next(iterator),))

    @without_python
    def train_loop_end(self) -> Output:
        """Returns the loss and the metrics of the model."""
        return dict(self.model.get_metrics_result())

    def _update(self, batch: Batch) -> None:
        model = self.model
        optimizer = model.optimizer
        variables = model.trainable_variables

        def loss_fn() -> Any:
            return optimizer.scale_loss(compute_loss(model, batch, training=True))

        _, gradients = value_and_grad(loss_fn, variables)
        gradients = all_reduce("sum", gradients)
        # Some optimizers assign inside branches when they are applied in place.
        new_weights, new_slots = optimizer.stateless_apply(
            [variable.value for variable in optimizer.variables],
            gradients,
            [variable.value for variable in variables],
        )
        for variable, value in zip(variables, new_weights, strict=True):
            variable.assign(value)
        for variable, value in zip(optimizer.variables, new_slots, strict=True):
            variable.assign(value)
