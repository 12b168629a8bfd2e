"""Saves and restores the checkpoints of a controller, and knows what is saved."""

import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from armillary._logging import logger
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
    ) -> None:
        self.manager, self.read_step = manager, read_step
        self._scope, self._goodput = scope, goodput
        # Whether to say what checkpoints lack; once, because all hold the same.
        self._untold = trainer

    def is_due(self, step: int) -> bool:
        """Returns whether the manager's interval asks for a save at `step`."""
        manager = self.manager
        if manager is None or manager.checkpoint_interval is None:
            return False
        return manager.is_due(step)

    def save(self) -> str | None:
        """Saves; returns the path, or `None` if nothing is written."""
        if self.manager is None:
            return None
        step = self.read_step()
        with self._goodput.phase(Category.SAVING):
            path = self.manager.save(checkpoint_number=step)
        if path is not None:
            self._goodput.mark("save", step)
            logger.info("saving checkpoint to %s.", path)
        return path

    def save_if_needed(self) -> None:
        """Saves, unless the latest checkpoint is that of this step."""
        if self.manager is not None and not self.manager.has_saved_step(
            self.read_step()
        ):
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
