"""Saves and restores a controller's checkpoints, or waits for those from another job.

A step is saved before it is evaluated. So this checkpoint lacks the changes of the
evaluation and its actions. The checkpoint records this, and a run that resumes from it
evaluates first, before it trains. At the end, the changes are saved as well.
"""

import contextlib
import math
import os
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from etils import epath

from armillary._launcher import notify_launcher
from armillary._logging import logger
from armillary._planned import is_planning
from armillary.actions._combined import notify
from armillary.actions._save_if_preempted import SaveCheckpointIfPreempted
from armillary.checkpoint._content import Content
from armillary.checkpoint._writer import agree_on
from armillary.cluster._join import get_peers
from armillary.controller._directory import read_end
from armillary.controller._run import Run, is_reached
from armillary.controller._unsaved import (
    warn_of_missing,
    warn_of_missing_arrays,
    warn_of_positions,
)
from armillary.distribute._global_arrays import is_divided, is_key
from armillary.errors import CheckpointDamageError, CheckpointError
from armillary.goodput._stopwatch import Category
from armillary.state._slots import is_equal
from armillary.trainer._standard_trainer import StandardTrainer
from armillary.typing import Action

if TYPE_CHECKING:
    from armillary.checkpoint._manager import CheckpointManager

_POLL_SECONDS = 1.0
# A file `DONE` that exists from the start counts after this time. Until then, a new
# training may begin and delete it.
_OLD_END_SECONDS = 300.0
# For each directory, the number of trainings there, and the last trainer.
_trainings: dict[str, tuple[int, weakref.ref[Any]]] = {}


def restore_if_good(restore: Callable[[str], object], path: str) -> bool:
    """Restores a checkpoint; returns False if it is damaged or deleted meanwhile."""
    try:
        restore(path)
    except Exception as error:
        if not epath.Path(path).exists():
            reason = "it was deleted meanwhile"
        elif isinstance(error, CheckpointDamageError):
            reason = f"it is damaged: {error.damage}"
        else:
            raise
        logger.warning("`%s` is not evaluated: %s.", path, reason)
        return False
    return True


class Saving:
    """The checkpoints of one controller, and the step that was `evaluated` last."""

    def __init__(self, run: Run, manager: "CheckpointManager | None") -> None:
        self.manager = manager
        self._run = run
        if manager is not None and isinstance(run.trainer, StandardTrainer):
            warn_of_missing_arrays(run.trainer, manager.checkpoint)
        self._has_seen_data = False
        self.evaluated: int | None = None
        # The step of the next evaluation, -1 for the end of the data.
        self._expected: int | None = None
        # The number of actions that have received the output of this evaluation.
        self._num_actions = 0
        # Whether an evaluation has changed values that were saved at its step.
        self._is_outdated = False
        # The path that was restored last.
        self._restored: str | None = None
        # Whether the current values are the best so far.
        self._is_best = False
        self._is_watching = False
        # Whether a loop has ended since the last restore.
        self.has_trained = False
        # The number of trainings in the directory at the last restore.
        self._num_trainings = 0

    @contextlib.contextmanager
    def training(self) -> Iterator[None]:
        """Notes that this controller's trainer trains in the directory.

        Raises:
            CheckpointError: If another trainer of this process has trained there since
                the last restore.
        """
        directory = self._run.directory
        if directory is None:
            yield
            return
        number, last = _trainings.get(directory, (0, None))
        trainer = self._run.trainer
        others = last is not None and last() is not trainer
        if others and number != self._num_trainings:
            raise CheckpointError(
                f"`{directory}` has checkpoints that another trainer of this program "
                "has written since this controller was made, and two runs would delete "
                "each other's checkpoints. Use another directory for this controller, "
                "or call `controller.restore_checkpoint()` to continue from the last "
                "checkpoint."
            )
        self._num_trainings = number + 1
        _trainings[directory] = self._num_trainings, weakref.ref(trainer)
        yield

    def warn_of_lost_positions(self) -> None:
        """Warns once if checkpoints leave out the position in the training data.

        The trainer has opened its data by now, so this has no effect on the data.
        """
        trainer = self._run.trainer
        if self._has_seen_data or self.manager is None:
            return
        self._has_seen_data = True
        if not isinstance(trainer, StandardTrainer):
            return
        warn_of_positions(
            trainer,
            self.manager.checkpoint.objects,
            is_restored=self._restored is not None,
        )

    def expect_evaluation(self, step: int | None) -> None:
        """Sets the step of the next evaluation: -1 for the end of the data."""
        if step != self._expected:
            self._expected = step
            self._num_actions = 0

    def is_evaluation_due(self) -> bool:
        """Returns whether an evaluation is expected at this step."""
        step = self._run.read_step()
        if self._expected is None or step == self.evaluated:
            return False
        return is_reached(step, self._expected) or self._run.trainer.data_exhausted

    def pending_actions(self, actions: Sequence[Action]) -> Iterator[Action]:
        """Yields the actions that need the output of this evaluation, and counts them.

        If an action saves, the checkpoint records that the earlier actions are done. A
        run that resumes from it calls this action again.
        """
        step = self._run.read_step()
        for index in range(self._num_actions, len(actions)):
            action = actions[index]
            # An action that only saves is done once its save begins.
            only_saves = isinstance(action, SaveCheckpointIfPreempted)
            self._num_actions = index + only_saves
            if self._num_actions == len(actions):
                self.evaluated = step
            yield action
        self.evaluated = step
        self._num_actions = 0

    def get_state(self) -> dict[str, Any]:
        """Returns the progress of the evaluation, for a checkpoint."""
        actions_done = self._num_actions if self.is_evaluation_due() else None
        return {"evaluated": self.evaluated, "actions_done": actions_done}

    def set_state(self, state: dict[str, Any] | None) -> None:
        """Restores the progress of the evaluation from a checkpoint, if it has any."""
        state = state or {"evaluated": None, "actions_done": None}
        self.evaluated = state["evaluated"]
        num_actions = state["actions_done"]
        self._expected = None if num_actions is None else self._run.read_step()
        self._num_actions = num_actions or 0

    def is_due(self, step: int) -> bool:
        """Returns whether the manager's interval asks for a save at `step`."""
        if self.manager is None or self.manager.checkpoint_interval is None:
            return False
        return self.manager.is_due(step)

    @contextlib.contextmanager
    def evaluation(self, *, is_last: bool) -> Iterator[None]:
        """Saves the last step before its evaluation; notes if saved values change."""
        step = self._run.read_step()
        self.expect_evaluation(step)
        if is_last:
            self.finish()
        if self.manager is None or not self.manager.has_saved_step(step):
            yield
            return
        before = self.manager.read_content()
        try:
            yield
        except BaseException:
            # The program may continue, and an action may have changed values before.
            self._is_outdated = True
            raise
        now = self.manager.read_content()
        topic = "whether an evaluation has changed saved values"
        differs = agree_on(topic, lambda: _differs(before, now), get_peers())
        # An evaluation of the same step may have failed before, after its changes.
        self._is_outdated = self._is_outdated or differs

    def watch(
        self, timeout: float | None, timeout_fn: Callable[[], bool] | None
    ) -> Iterator[str]:
        """Yields each checkpoint of another job once, until its training has ended."""
        manager = self.manager
        stop = self._run.stop
        assert manager is not None  # The controller has checked it.
        seen: set[str] = set()
        seconds = math.inf if timeout is None else timeout
        last_at = time.monotonic()
        old_end = read_end(manager.directory)
        old_end_counts = last_at + _OLD_END_SECONDS
        self._is_watching = True
        try:
            while stop.reason is None:
                # ORDER: the clock and the file `DONE` are read before the directory, so
                # that a checkpoint of the last moment is still found.
                now = time.monotonic()
                end = read_end(manager.directory)
                found = manager.checkpoints
                # A checkpoint that is gone may be saved again under its name.
                seen.intersection_update(found)
                new = [path for path in found if path not in seen]
                remaining = last_at + seconds - now
                if new:
                    seen.add(new[0])
                    notify_launcher("evaluating", new[0])
                    yield new[0]
                elif end is not None and (end != old_end or now >= old_end_counts):
                    return
                elif remaining > 0:
                    time.sleep(min(_POLL_SECONDS, remaining))
                    continue
                elif timeout_fn is None or timeout_fn():
                    return
                last_at = time.monotonic()
        finally:
            self._is_watching = False

    def note_evaluation(self, output: Mapping[str, Any]) -> None:
        """Gives the output of an evaluation to the manager, before actions get it."""
        if self.manager is None:
            return
        is_own = self._run.trainer is not None and not self._is_watching
        if is_own:
            self._is_best = self.manager.note_evaluation(output, None)
        elif self._restored is not None:
            self._is_best = self.manager.note_evaluation(output, self._restored)

    def save_best(self) -> None:
        """Saves if the evaluation found the best values, unless the step is saved."""
        if self._is_best and self.manager is not None:
            self._is_best = False
            if not self.manager.has_saved_step(self._run.read_step()):
                self.save()

    def save(self) -> str | None:
        """Saves; returns the path, or `None` if nothing is written."""
        if self.manager is None:
            return None
        step = self._run.read_step()
        self._is_outdated = False
        with self._run.goodput.phase(Category.SAVING):
            path = self.manager.save(checkpoint_number=step)
        if path is not None:
            self._run.goodput.mark("save", step)
            logger.info("saving checkpoint to %s.", path)
        return path

    def is_snapshot_due(self) -> bool:
        """Returns whether to keep the values in memory now; all processes call it."""
        manager = self.manager
        return (
            manager is not None
            and manager.memory is not None
            and manager.memory.is_due()
        )

    def save_to_memory(self) -> None:
        """Keeps the current values in memory. Call `is_snapshot_due` before."""
        assert self.manager is not None
        with self._run.goodput.phase(Category.SAVING):
            self.manager.take_snapshot()

    def drop_memory(self) -> None:
        """Removes the values in memory, if the disk has newer ones."""
        if self.manager is not None:
            self.manager.drop_memory()

    def finish(self) -> None:
        """Saves, unless the latest checkpoint holds this step and its current state."""
        self.sync()
        if self.manager is not None:
            is_saved = self.manager.has_saved_step(self._run.read_step())
            if self._is_outdated or not is_saved:
                self.save()

    def sync(self) -> None:
        """Waits for the saves that are still being written."""
        if self.manager is not None:
            with self._run.goodput.phase(Category.SAVING):
                self.manager.sync()

    def restore(self, path: str | os.PathLike[str] | None = None) -> str | None:
        """Restores a checkpoint, by default the latest; returns its path, if any."""
        manager = self.manager
        run = self._run
        # The state of a plan has no values.
        if manager is None or is_planning():
            return None
        with run.goodput.phase(Category.RESTORING), run.scope():
            if path is not None:
                restored = manager.restore(path)
            else:
                restored = manager.restore_or_initialize()

        here = run.directory
        self._num_trainings, _ = _trainings.get(here or "", (0, None))
        self._is_outdated = False
        self.has_trained = False
        self._restored = restored if os.path.dirname(restored or "") == here else None
        if restored is None:
            return None

        logger.info("restored from checkpoint: %s", restored)
        step = run.read_step()
        run.goodput.mark("restore", step)
        notify(run.train_actions, "resume_at", step)
        if run.trainer is not None:
            # A step that is evaluated again runs its actions again. A job that watches
            # has run them for the checkpoints before this one.
            if not self._is_watching:
                notify(run.eval_actions, "resume_at", self.evaluated or 0)
            for curves in {run.curves, run.eval_curves}:
                curves.resume_at(step)
        warn_of_missing(run.trainer, manager.checkpoint.objects, restored, step)
        return restored


def _differs(before: Content, now: Content) -> bool:
    """Returns whether an evaluation has changed a value that is saved."""
    if before.states != now.states or before.leaves.keys() != now.leaves.keys():
        return True
    if before.state_arrays.keys() != now.state_arrays.keys():
        return True

    old = {**before.leaves, **before.state_arrays}
    new = {**now.leaves, **now.state_arrays}
    return not all(_is_same(leaf, new[path]) for path, leaf in old.items())


def _is_same(before: Any, now: Any) -> bool:
    """Returns whether a value is unchanged; it may have moved to other devices."""
    if before is now:
        return True
    if isinstance(before, jax.Array) and before.is_deleted():
        return False  # A compiled step has replaced it, and reused its memory.
    if is_divided(before) or is_divided(now):
        return False
    return is_equal(_as_numpy(before), _as_numpy(now))


def _as_numpy(leaf: Any) -> np.ndarray:
    return np.asarray(jax.random.key_data(leaf) if is_key(leaf) else leaf)
