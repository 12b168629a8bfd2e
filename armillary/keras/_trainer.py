"""The inner training loop of a compiled Keras model."""

from typing import Any

from armillary.distribute.replica._context import get_strategy, require_replica_context
from armillary.distribute.replica._value_and_grad import value_and_grad
from armillary.keras._model import (
    build,
    check_compiled,
    compute_loss,
    distribute,
    track_loss,
)
from armillary.trainer._hooks import without_python
from armillary.trainer._options import StandardTrainerOptions
from armillary.trainer._standard_trainer import StandardTrainer
from armillary.typing import Batch, Output


class KerasTrainer(StandardTrainer):
    """Trains a compiled Keras model, as `model.fit` does, for a `Controller`.

    Each loop returns the loss and the metrics of the model. Layers with batch
    statistics use those of each replica's share of the batch.

    Args:
        model: A model on which `compile` was called. `train_step` of a subclass is not
            called: derive from `StandardTrainer` for a step of your own.
        train_dataset: As for `StandardTrainer`. Batches are `(x, y)` or
            `(x, y, sample_weight)`. What is not distributed yet is, by the strategy in
            effect. One batch is looked at to build the model.
        options: As for `StandardTrainer`.

    Raises:
        TypeError: If `model` is no Keras model, or has a `train_step` of its own.
        ValueError: If it is not compiled, or there is no data.
    """

    def __init__(
        self,
        model: Any,
        train_dataset: Any,
        options: StandardTrainerOptions | None = None,
    ) -> None:
        check_compiled(model)
        dataset = distribute(train_dataset)
        super().__init__(dataset, options)
        build(model, dataset)
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
        model, optimizer = self.model, self.model.optimizer
        context = require_replica_context("KerasTrainer", "")
        num_replicas = context.num_replicas_in_sync
        variables = model.trainable_variables

        def loss_fn() -> tuple[Any, Any]:
            loss, num_examples = compute_loss(model, batch, num_replicas, training=True)
            return optimizer.scale_loss(loss), (loss, num_examples)

        (_, aux), gradients = value_and_grad(loss_fn, variables, has_aux=True)
        gradients = context.all_reduce("sum", gradients)
        loss, num_examples = aux
        track_loss(model, loss, num_examples, num_replicas)
        # Some optimizers assign inside branches when they are applied in place.
        new, own = optimizer.stateless_apply(
            [variable.value for variable in optimizer.variables],
            gradients,
            [variable.value for variable in variables],
        )
        for variable, value in zip(
            [*variables, *optimizer.variables], [*new, *own], strict=True
        ):
            variable.assign(value)
