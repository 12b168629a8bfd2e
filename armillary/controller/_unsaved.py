"""Warnings about objects that only the checkpoint or only the controller has."""

from collections.abc import Iterable, Mapping
from types import FunctionType
from typing import Any

from armillary._checks import counted, list_lines
from armillary._logging import logger
from armillary.actions._combined import find_parts
from armillary.actions._conditions import EarlyStopping, NewBestMetric
from armillary.checkpoint._checkpoint import Checkpoint, has_position
from armillary.checkpoint._python_state import is_generator
from armillary.data._dataset import DistributedDataset
from armillary.data.sources._arrays import IndexedDataset
from armillary.state._holders import held_by
from armillary.trainer._datasets import flatten_datasets
from armillary.trainer._standard_trainer import StandardTrainer, find_positions


def warn_of_missing_arrays(trainer: Any, checkpoint: Checkpoint) -> None:
    """Warns if checkpoints lack arrays of a trainer."""
    if any(value is trainer for value in checkpoint.objects.values()):
        return
    if missing := checkpoint.find_missing(trainer):
        logger.warning(
            "`Checkpoint` leaves out %s of the trainer, so a run that resumes begins "
            "with new values there. A dictionary that the steps replace is left out "
            "as well:\n%s\n"
            "Save all arrays of the trainer: `Checkpoint(trainer=trainer)`.",
            counted(len(missing), "array"),
            list_lines(missing, 5),
        )


def warn_of_missing(
    trainer: Any, objects: Mapping[str, Any], restored: str, step: int
) -> None:
    """Warns if steps or data begin again after a checkpoint was restored."""
    if not isinstance(trainer, StandardTrainer):
        return
    if step == 0 and not restored.rstrip("/").endswith("checkpoint_0"):
        logger.warning(
            "%s was restored, but the global step is still 0, because the step counter "
            "is not in it. Save the trainer: `Checkpoint(trainer=trainer)`.",
            restored,
        )
    if any(value is trainer for value in objects.values()):
        return
    saved = _find_saved_data(objects)
    for dataset in flatten_datasets(trainer.train_dataset)[0]:
        is_ours = isinstance(dataset, IndexedDataset | DistributedDataset)
        if is_ours and dataset.is_repositionable and id(dataset) not in saved:
            logger.warning(
                "%s was restored, but the position of the training data is not in it, "
                "so the first batches are read again. Save the trainer with everything "
                "that it holds: `Checkpoint(trainer=trainer)`.",
                restored,
            )
            return


def warn_of_positions(
    trainer: StandardTrainer, objects: Mapping[str, Any], *, is_restored: bool
) -> None:
    """Warns if checkpoints leave out the position in the training data.

    The trainer must have opened its data, so that this has no effect on the data.
    """
    holds_trainer = any(value is trainer for value in objects.values())
    saved = set() if holds_trainer else _find_saved_data(objects)
    datasets = flatten_datasets(trainer.train_dataset)[0]
    if all(id(dataset) in saved for dataset in datasets):
        return

    parts = find_positions(trainer)
    if holds_trainer or is_restored:
        return  # A restore has warned already of a position that is left out.
    for dataset, part in zip(datasets, parts, strict=True):
        if part is not None and not saved & {id(dataset), id(part)}:
            logger.warning(
                "`Checkpoint` leaves out the position in the training data (%s), so a "
                "run that resumes reads the first batches again. Save the trainer "
                "with everything that it holds: `Checkpoint(trainer=trainer)`.",
                part.source_name,
            )
            return


def _find_saved_data(objects: Mapping[str, Any]) -> set[int]:
    """Returns the identities of the objects of a checkpoint, and of their datasets."""
    # An object that saves the position of a dataset has it as `dataset`, as in an
    # estimator.
    return {id(getattr(value, "dataset", value)) for value in objects.values()}


def warn_of_unsaved(actions: Iterable[Any], trainer: Any, held: Checkpoint) -> None:
    """Warns of states that checkpoints do not hold."""
    saved = [id(value) for value in held.objects.values()]
    for name, value in held_by(trainer):
        # A trainer saves the positions of its data, and evaluation data needs none.
        is_data = isinstance(value, IndexedDataset | DistributedDataset)
        has_state = has_position(value) or is_generator(value)
        if has_state and not (is_data or id(value) in saved):
            logger.warning(
                "`%s` of the trainer has a state (`%s`) that the `Checkpoint` leaves "
                "out, so a restart forgets it. Name it there: `Checkpoint(..., "
                "%s=trainer.%s)`.",
                *(name, "get_state" if has_position(value) else type(value).__name__),
                *(name, name),
            )
    for part in find_parts(actions):
        if id(part) in saved or not has_position(part):
            continue
        if isinstance(part, NewBestMetric) and part.file is not None:
            continue  # It keeps its state in a file of its own.
        logger.warning(
            "An action of type `%s` is not in the `Checkpoint`, so a restart forgets "
            "its state. Name it there: `Checkpoint(..., action=action)`.",
            type(part).__name__,
        )


def warn_of_uncalled(actions: Iterable[Any], held: Checkpoint) -> None:
    """Warns if checkpoints hold an `EarlyStopping` that no action calls."""
    parts = find_parts(actions)
    # A function of the user may call it.
    if any(isinstance(part, FunctionType) for part in parts):
        return
    called = [id(part) for part in parts]
    for name, value in held.objects.items():
        if isinstance(value, EarlyStopping) and id(value) not in called:
            logger.warning(
                "The `Checkpoint` holds an `EarlyStopping` as `%s`, but no action of "
                "the controller calls it, so it never stops the run. Pass it to the "
                "controller: `eval_actions=[%s]`.",
                *(name, name),
            )
