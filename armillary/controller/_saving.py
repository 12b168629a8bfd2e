"""Saves and restores the checkpoints of a controller, and knows what is saved.

How far the evaluation of a step is: what each checkpoint says of it.

A checkpoint may be saved before the evaluation that follows its step, or within it.
What the evaluation and its actions change is not in it then. It says so, and a run that
resumes there does what is left first, before it trains on.

Warns of what a restored checkpoint lacks, where a run would not go on as it was.

What follows a run, also one that fails: its first error is the one to be told.
"""

import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import jax

from armillary._logging import logger
from armillary.actions._conditions import NewBestMetric
from armillary.actions._periodic import find_parts
from armillary.actions._save_if_preempted import SaveCheckpointIfPreempted
from armillary.checkpoint._checkpoint import has_position
from armillary.checkpoint._store import Content
from armillary.checkpoint._writer import decide
from armillary.cluster._join import get_peers
from armillary.data._dataset import DistributedDataset
from armillary.data.sources._arrays import IndexedDataset
from armillary.errors import CheckpointError
from armillary.goodput._journal import Recorder
from armillary.goodput._stopwatch import Category
from armillary.trainer._contract import AbstractTrainer
from armillary.trainer._loop_data import flatten_datasets
from armillary.trainer._standard_trainer import StandardTrainer
from armillary.typing import Action

if TYPE_CHECKING:
    from armillary.checkpoint._manager import CheckpointManager


class EvaluationMark:
    """The evaluations of one controller that belong to its training.

    Attributes:
        evaluated: The step that was evaluated last, with all actions, or `None`.
    """

    def __init__(self, read_step: Callable[[], int], trainer: Any) -> None:
        self._read_step, self._trainer = read_step, trainer
        self.evaluated: int | None = None
        # The step at which an evaluation follows, -1 for where the data ends.
        self._due: int | None = None
        # Actions that have had the output of the evaluation that is due.
        self._num_actions = 0

    def expect(self, step: int | None) -> None:
        """Says where the next evaluation is to be: -1 where the data ends, or nowhere.

        If data ends before, it is there.
        """
        if step != self._due:
            self._due, self._num_actions = step, 0

    @property
    def is_expecting(self) -> bool:
        """Whether an evaluation follows at all."""
        return self._due is not None

    @property
    def is_due(self) -> bool:
        """Whether an evaluation follows at this step, as far as is known."""
        step = self._read_step()
        if self._due is None or step == self.evaluated:
            return False
        return step == self._due or bool(
            getattr(self._trainer, "data_exhausted", False)
        )

    def take(self, actions: Sequence[Action]) -> Iterator[Action]:
        """Yields the actions that lack the output of this evaluation, and counts them.

        A save within an action finds that one to be done again, and nothing before it.
        """
        step = self._read_step()
        for index in range(self._num_actions, len(actions)):
            action = actions[index]
            # What only saves has nothing left to do.
            only_saves = isinstance(action, SaveCheckpointIfPreempted)
            self._num_actions = index + only_saves
            if self._num_actions == len(actions):
                self.evaluated = step
            yield action
        self.evaluated, self._num_actions = step, 0

    def get_state(self) -> dict[str, Any]:
        """Returns what a checkpoint of this moment says."""
        actions_done = self._num_actions if self.is_due else None
        return {"evaluated": self.evaluated, "actions_done": actions_done}

    def set_state(self, state: dict[str, Any] | None) -> None:
        """Takes over what a checkpoint says; nothing, if it was saved without."""
        state = state or {"evaluated": None, "actions_done": None}
        self.evaluated, num_actions = state["evaluated"], state["actions_done"]
        self._due = None if num_actions is None else self._read_step()
        self._num_actions = num_actions or 0


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


@contextlib.contextmanager
def finishing(
    report: Callable[[], None], *finishes: Callable[[], None]
) -> Iterator[None]:
    """Calls `finishes` after a block; after an error, `report` and all of them."""
    try:
        yield
    except BaseException as error:
        peers = get_peers()
        cause = None if peers is None else peers.explain(error)
        for finish in (report, *finishes):
            try:
                finish()
            except Exception as later_error:
                if str(later_error) == str(error):
                    continue  # It is the same one: what failed says so again.
                # The first error is the cause; the second must not replace it.
                error.add_note(f"Pending writes failed as well: {later_error!r}")
                logger.warning("Pending writes failed as well: %r", later_error)
        if cause is not None:
            raise cause from error
        raise
    for finish in finishes:
        finish()


class Saving:
    """The checkpoints of one controller; without a manager, nothing happens."""

    def __init__(
        self,
        manager: "CheckpointManager | None",
        trainer: AbstractTrainer | None,
        read_step: Callable[[], int],
        scope: Callable[[], AbstractContextManager[Any]],
        goodput: Recorder,
        mark: EvaluationMark,
    ) -> None:
        self.manager, self.read_step = manager, read_step
        self._scope, self._goodput, self._mark = scope, goodput, mark
        # What a save would have written before the evaluation that runs.
        self._before: Content | None = None
        # Whether an evaluation has changed what was saved at its step.
        self._is_outdated = False
        # Whether to say what checkpoints lack; once, because all hold the same.
        self._untold = trainer

    def is_due(self, step: int) -> bool:
        """Returns whether the manager's interval asks for a save at `step`."""
        manager = self.manager
        if manager is None or manager.checkpoint_interval is None:
            return False
        return manager.is_due(step)

    def follows_evaluation(self, *, is_stop: bool) -> bool:
        """Returns whether a save at this step waits for an evaluation.

        It must not where processes train together: if one of them failed meanwhile,
        they could not save any more.
        """
        if get_peers() is not None or not self._mark.is_expecting:
            return False
        return is_stop or self._mark.is_due

    def begin_evaluation(self, *, is_last: bool) -> None:
        """Notes what is lost if the evaluation of this step fails, if a save is due."""
        if self.manager is None or not (is_last or self.is_due(self.read_step())):
            return
        if get_peers() is not None:
            self.save_if_needed()
        self._before = self.manager.read_content()

    def end_evaluation(self) -> None:
        """Saves what an evaluation and its actions have made of this step, if due."""
        before, self._before = self._before, None
        if self.manager is None or before is None:
            return
        if not self.manager.has_saved_step(self.read_step()):
            self.save()
            return
        now = self.manager.read_content()
        topic = "whether an evaluation has changed what is saved"
        self._is_outdated = decide(topic, lambda: _differs(before, now), get_peers())

    def save_unevaluated(self) -> None:
        """Saves a step whose evaluation has failed, as it was before it, if due."""
        before, self._before = self._before, None
        if self.manager is None or before is None or get_peers() is not None:
            return
        step = self.read_step()
        if not self.manager.has_saved_step(step):
            # What the evaluation has taken the memory of, it makes anew.
            now = self.manager.checkpoint.read_leaves()
            leaves = {
                path: now[path] if _is_deleted(leaf) else leaf
                for path, leaf in before.leaves.items()
            }
            self._save(step, dataclasses.replace(before, leaves=leaves))

    def save(self) -> str | None:
        """Saves; returns the path, or `None` if nothing is written."""
        return self._save(self.read_step(), None)

    def _save(self, step: int, content: Content | None) -> str | None:
        if self.manager is None:
            return None
        self._is_outdated = False
        with self._goodput.phase(Category.SAVING):
            if content is None:
                path = self.manager.save(checkpoint_number=step)
            else:
                self.manager.sync()
                path = self.manager.save_content(step, content)
        if path is not None:
            self._goodput.mark("save", step)
            logger.info("saving checkpoint to %s.", path)
        return path

    def save_if_needed(self) -> None:
        """Saves, unless the latest checkpoint is that of this step as it is now."""
        if self.manager is None:
            return
        if self._is_outdated or not self.manager.has_saved_step(self.read_step()):
            self.save()

    def finish(self) -> None:
        """Saves if needed, also after a save of this step that has just failed."""
        self.sync()
        self.save_if_needed()

    def save_and_wait(self) -> str:
        """Saves, and waits until the checkpoint is on disk; returns its path."""
        path = self.save()
        self.sync()
        # With `on_write_error="warn"` training goes on without a checkpoint, but this
        # method promises one.
        error = getattr(self.manager, "last_error", None)
        if error is not None:
            raise error
        if path is None:
            raise CheckpointError(
                f"`checkpoint_manager.save` wrote nothing at step {self.read_step()}, "
                "but it must return the path of the checkpoint. Use an "
                "`armillary.CheckpointManager`."
            )
        return path

    def sync(self) -> None:
        """Waits for the saves that are still being written."""
        if self.manager is not None:
            with self._goodput.phase(Category.SAVING):
                self.manager.sync()

    def restore(self, path: str | os.PathLike[str] | None = None) -> str | None:
        """Restores a checkpoint, by default the latest one; returns its path.

        Without one, there is nothing to restore, and no path.
        """
        manager = self.manager
        if manager is None:
            return None
        with self._goodput.phase(Category.RESTORING), self._scope():
            if path is not None:
                restored = manager.restore(path)
            else:
                restored = manager.restore_or_initialize()
        if restored is None:
            return None
        logger.info("restored from checkpoint: %s", restored)
        step = self.read_step()
        self._goodput.mark("restore", step)
        warn_of_missing(self._untold, manager.checkpoint.objects, restored, step)
        self._untold = None
        return restored


def _differs(before: Content, now: Content) -> bool:
    """Returns whether an evaluation has changed a value that is saved."""
    if before.states != now.states or before.leaves.keys() != now.leaves.keys():
        return True
    return any(now.leaves[path] is not leaf for path, leaf in before.leaves.items())


def _is_deleted(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and leaf.is_deleted()
