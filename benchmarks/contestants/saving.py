"""Armillary with a checkpoint every 100 steps, written in the background."""

import atexit
import shutil
import tempfile

import armillary
from benchmarks.contestants import SAVE_INTERVAL
from benchmarks.contestants.controller import ControllerContestant


class SavingContestant(ControllerContestant):
    """As `armillary`, with a `CheckpointManager`."""

    def make_checkpoint_manager(self) -> armillary.CheckpointManager:
        """Returns a manager of a folder that goes away with the process."""
        folder = tempfile.mkdtemp(prefix="armillary-bench-")
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        checkpoint = armillary.Checkpoint(
            model=self.model, optimizer=self.optimizer, train_dataset=self.dataset
        )
        return armillary.CheckpointManager(
            checkpoint,
            folder,
            max_to_keep=2,
            checkpoint_interval=SAVE_INTERVAL,
        )
