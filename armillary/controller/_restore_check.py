"""Warns of what a restored checkpoint lacks, where a run would not go on as it was."""

from collections.abc import Iterable, Mapping
from typing import Any

from armillary._logging import logger
from armillary.actions._best_metric import NewBestMetric
from armillary.actions._parts import find_parts
from armillary.checkpoint._checkpoint import has_position
from armillary.data._dataset import DistributedDataset
from armillary.data.sources._indexed import IndexedDataset
from armillary.trainer._loop_data import flatten_datasets
from armillary.trainer._standard_trainer import StandardTrainer


def warn_of_missing(
    trainer: Any, objects: Mapping[str, Any], restored: str, step: int
) -> None:
    """Warns if a restored checkpoint lets steps or data begin anew."""
    if not isinstance(trainer, StandardTrainer):
        return
    if step == 0 and not restored.rstrip("/").endswith("checkpoint_0"):
        logger.warning(
            "%s was restored, but the global step is still 0: what counts the steps is "
            "not in the checkpoint, so all of them are trained again. Save it as well: "
            "`Checkpoint(model=model, optimizer=optimizer)`.",
            restored,
        )
    datasets, _ = flatten_datasets(trainer.train_dataset)
    for dataset in datasets:
        # What saves the position for it, as an estimator does, has it as `dataset`.
        is_saved = any(
            dataset is getattr(value, "dataset", value) for value in objects.values()
        )
        if _can_be_saved(dataset) and not is_saved:
            logger.warning(
                "%s was restored, but the position of the training data is not in it, "
                "so the first batches are read again. Save it as well: "
                "`dataset = strategy.distribute_dataset(source)`, give that to the "
                "trainer, and `train_dataset=dataset` to the `Checkpoint`.",
                restored,
            )
            return


def warn_of_unsaved(actions: Iterable[Any], objects: Mapping[str, Any]) -> None:
    """Warns of actions with a state that checkpoints of these objects do not hold."""
    saved = [id(value) for value in objects.values()]
    for part in find_parts(actions):
        if id(part) in saved or not has_position(part):
            continue
        if isinstance(part, NewBestMetric) and part.file is not None:
            continue  # It keeps its state by itself.
        saved.append(id(part))
        logger.warning(
            "An action of type `%s` is not in the `Checkpoint`, so a restart forgets "
            "what it has seen. Name it there: `Checkpoint(..., action=action)`.",
            type(part).__name__,
        )


def _can_be_saved(dataset: Any) -> bool:
    is_ours = isinstance(dataset, IndexedDataset | DistributedDataset)
    return is_ours and dataset.is_repositionable
