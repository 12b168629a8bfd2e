"""Saves and restores the checkpoints of a controller, and knows what is saved."""

import dataclasses
import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import jax

from armillary._logging import logger
from armillary.checkpoint._joint import decide
from armillary.checkpoint._leaf import Content
from armillary.cluster._join import get_peers
from armillary.controller._evaluation_mark import EvaluationMark
from armillary.controller._restore_check import warn_of_missing
from armillary.errors import CheckpointError
from armillary.goodput._category import Category
from armillary.goodput._recorder import Recorder
from armillary.trainer._contract import AbstractTrainer

if TYPE_CHECKING:
    from armillary.checkpoint._manager import CheckpointManager


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
