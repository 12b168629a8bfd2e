"""The evaluation of a compiled Keras model."""

from typing import Any

from armillary.distribute.replica._context import get_strategy, require_replica_context
from armillary.keras._model import (
    build,
    check_compiled,
    compute_loss,
    distribute,
    track_loss,
)
from armillary.trainer._options import StandardEvaluatorOptions
from armillary.trainer._standard_evaluator import StandardEvaluator
from armillary.typing import Batch, Output


class KerasEvaluator(StandardEvaluator):
    """Evaluates a compiled Keras model, as `model.evaluate` does, for a `Controller`.

    Every example counts once, whatever the batch size and the number of replicas.

    Args:
        model: A model on which `compile` was called.
        eval_dataset: As `train_dataset` of `KerasTrainer`.
        options: As for `StandardEvaluator`.

    Raises:
        TypeError: If `model` is no Keras model, or has a `test_step` of its own.
        ValueError: If it is not compiled, or there is no data.
    """

    def __init__(
        self,
        model: Any,
        eval_dataset: Any,
        options: StandardEvaluatorOptions | None = None,
    ) -> None:
        check_compiled(model)
        dataset = distribute(eval_dataset)
        super().__init__(dataset, options)
        build(model, dataset)
        self.model = model

    def eval_begin(self) -> None:
        """Resets the metrics of the model."""
        self.model.reset_metrics()

    def eval_step(self, iterator: Any) -> None:
        """Adds one batch to the metrics of the model."""
        get_strategy().run(self._add, args=(next(iterator),))

    def eval_end(self, *state: Any) -> Output:
        """Returns the loss and the metrics of the model."""
        del state
        return dict(self.model.get_metrics_result())

    def _add(self, batch: Batch) -> None:
        context = require_replica_context("KerasEvaluator", "")
        num_replicas = context.num_replicas_in_sync
        loss, num_examples = compute_loss(
            self.model, batch, num_replicas, training=False
        )
        track_loss(self.model, loss, num_examples, num_replicas)
