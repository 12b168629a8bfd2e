"""Predictions of a model function, by examples or by batches."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from armillary._logging import ensure_visible, logger
from armillary._traceback import hides_frames
from armillary.checkpoint._checkpoint import Checkpoint
from armillary.data._input_context import InputContext
from armillary.distribute.program._function import function
from armillary.distribute.strategies._single import DefaultStrategy
from armillary.errors import EstimatorError
from armillary.estimator._estimator_spec import ModeKeys
from armillary.estimator._input import InputFn, find_batch_spec
from armillary.estimator._model_fn import Model, Modules, ModuleStore
from armillary.typing import PyTree


@hides_frames
def predict(
    model: Model,
    make_data: InputFn,
    find_checkpoint: Callable[[], str | None],
    *,
    yields_examples: bool,
) -> Iterator[Any]:
    """Yields the predictions of a checkpoint, of which it reads the modules alone."""
    strategy = DefaultStrategy()
    dataset = strategy.distribute_dataset(make_data(InputContext()))
    features = _features_of(find_batch_spec(dataset))
    model.build(features, None, ModeKeys.PREDICT)
    ensure_visible()
    path = find_checkpoint()
    if path is None:
        logger.info("found no checkpoint; predicting as it is.")
    else:
        Checkpoint(model=model.store).read(path)

    @function(strategy=strategy)
    def predict_batch(store: ModuleStore, features: PyTree) -> PyTree:
        mode = ModeKeys.PREDICT
        return model.model_fn(Modules(store), features, None, mode).predictions

    for batch in dataset:
        predictions = jax.device_get(predict_batch(model.store, _features_of(batch)))
        if not yields_examples:
            yield predictions
            continue
        leaves, treedef = jax.tree.flatten(predictions)
        _check_rows(leaves, batch)
        for row in zip(*leaves, strict=True):
            yield treedef.unflatten(row)


def _features_of(batch: Any) -> Any:
    return batch[0] if type(batch) in (tuple, list) else batch


def _check_rows(leaves: list[Any], batch: Any) -> None:
    num_rows = len(jax.tree.leaves(batch)[0])
    shapes = [np.shape(leaf) for leaf in leaves]
    if not leaves or any(shape[:1] != (num_rows,) for shape in shapes):
        raise EstimatorError(
            f"`predictions` of the `EstimatorSpec` have the shapes {shapes}, but the "
            f"batch has {num_rows} examples. Give arrays with an entry for each, or "
            "take whole batches: `predict(..., yield_single_examples=False)`."
        )
