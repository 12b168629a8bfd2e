"""The manager of a directory of checkpoints: saves, keeps, restores, removes."""

import contextlib
import dataclasses
import functools
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

from etils import epath

from armillary._checks import (
    check_instance,
    check_not_negative,
    check_not_negative_int,
    check_one_of,
    check_path,
    check_positive_int,
    check_seconds,
    check_takes,
)
from armillary._copy_refusal import OfOneProcess
from armillary._launcher import notify_launcher
from armillary._logging import logger
from armillary.checkpoint._best import Mark, check_best, is_best, make_mark, read_best
from armillary.checkpoint._checkpoint import Checkpoint
from armillary.checkpoint._content import Content
from armillary.checkpoint._folder import as_checkpoint, as_place, find_checkpoints
from armillary.checkpoint._reader import restore, restore_from
from armillary.checkpoint._selection import (
    Paths,
    RestoreReport,
    Selection,
    as_paths,
)
from armillary.checkpoint._writer import Writer, agree_on, announcing_errors
from armillary.checkpoint.memory._run_folder import DEFAULT_DIRECTORY
from armillary.checkpoint.memory._tier import MemoryTier
from armillary.cluster._join import get_peers
from armillary.errors import CheckpointError
from armillary.state._step_counter import as_step_counter


class CheckpointManager(OfOneProcess):
    """Saves and restores a `Checkpoint` below one directory.

    One job writes to a directory at a time, and other jobs may read it. Folders are
    named `checkpoint_<number>`. Saving a number again makes `checkpoint_<number>.1`,
    and removes the older folder once the new folder is complete. Everything else in the
    directory (event files, other folders) is not touched, so you can use the directory
    of the run.

    In a job of several processes, all processes call the same methods, and all must see
    the directory. Process 0 writes, and all processes read. The number of processes may
    change between runs.

    Args:
        checkpoint: The objects to save.
        directory: Directory of the checkpoints, in a file system or in `gs://`. The
            first save makes it if it does not exist.
        max_to_keep: The number of newest checkpoints to keep; `None` keeps all.
        keep_checkpoint_every_n_hours: Keeps some of the checkpoints that `max_to_keep`
            would remove forever: each checkpoint that was saved at least this many
            hours after the last one kept, or after the directory was first used. `None`
            keeps none.
        keep_best: A metric, such as `"accuracy"`, or `"validation/accuracy"` for
            several evaluators. The checkpoint with the best value is also kept, until
            there is a better one. Ties keep the earlier checkpoint, and NaN is never
            best. A `Controller` saves a new best that is not saved yet. `None` keeps
            none.
        higher_is_better: Whether a larger value of `keep_best` is better: true for an
            accuracy, false for a loss.
        step_counter: A variable such as `optimizer.step`, or a function without
            arguments, that gives the current step. A `Controller` binds its global step
            if this is `None`.
        checkpoint_interval: Steps between saves with `check_interval`; it needs a step
            counter. As in Orbit, a `Controller` saves after its first loop, and then
            whenever at least this many steps have passed since the last save. For
            example, 1000 with loops of 500 steps saves at steps 500, 1500, 2500 and so
            on. `"auto"` saves as often as possible at a low cost: at most 1 % of
            the time is spent waiting for saves, saves are written at most 10 % of the
            time, and they begin at least 10 seconds apart. `None` never skips a save.
        init_fn: Called by `restore_or_initialize` if there is no checkpoint. To begin
            with a pretrained part:
            `init_fn=lambda: checkpoint.read(path, only="model/encoder")`.
        may_differ: Paths of parts that may have changed between two runs: an optimizer
            (`"optimizer/opt_state"`), averages of weights, data that has grown
            (`"train_dataset"`). A part that fits the checkpoint is restored. A part
            that does not fit keeps all values of the program, with a warning.
        memory_interval_seconds: Seconds between two snapshots of the values in the
            memory of the machines, next to the checkpoints on the disk. `None` keeps
            none.
        memory_directory: A folder in memory for the snapshots, such as a `tmpfs`. It
            needs `memory_interval_seconds`. `None` takes `/dev/shm`.

    Raises:
        ImportError: If `directory` is in an object store whose package is missing.
        TypeError: If an argument is of the wrong type.
        ValueError: If a number is out of range, a path of `may_differ` is empty, or
            `directory` is in an object store other than `gs://`. Also
            if `keep_best` is given without `higher_is_better`, or differs from the
            directory, or if `memory_directory` is not an existing folder.
    """

    _why_not_copied = "it writes one directory of this process"
    _copy_instead = (
        "Make a new `CheckpointManager` in the process that uses it, with the objects "
        "of that process."
    )

    def __init__(
        self,
        checkpoint: Checkpoint,
        directory: str | os.PathLike[str],
        *,
        max_to_keep: int | None = 5,
        keep_checkpoint_every_n_hours: float | None = None,
        keep_best: str | None = None,
        higher_is_better: bool | None = None,
        step_counter: Any = None,
        checkpoint_interval: int | Literal["auto"] | None = None,
        init_fn: Callable[[], Any] | None = None,
        may_differ: Paths = (),
        memory_interval_seconds: float | None = None,
        memory_directory: str | os.PathLike[str] | None = None,
    ) -> None:
        hours = keep_checkpoint_every_n_hours
        interval = checkpoint_interval
        fix = "Use `Checkpoint(trainer=trainer)`."
        check_instance("checkpoint", checkpoint, Checkpoint, fix)
        if max_to_keep is not None:
            max_to_keep = check_positive_int("max_to_keep", max_to_keep)
        if hours is not None:
            check_not_negative("keep_checkpoint_every_n_hours", hours)
        self._is_paced = isinstance(interval, str) and interval == "auto"
        if self._is_paced:
            interval = 1  # Until the duration of a step and of a save is known.
        elif interval is not None:
            interval = check_positive_int(
                "checkpoint_interval", interval, fix='Or use `"auto"`.'
            )
        if init_fn is not None:
            check_takes("init_fn", init_fn)

        self.checkpoint = checkpoint
        """The `Checkpoint` that is saved."""
        self.checkpoint_interval = interval
        """Steps between saves with `check_interval`; `"auto"` changes the number."""
        self._directory = as_place("directory", directory)
        self.directory = str(self._directory)
        """The absolute path of the directory."""
        self._init_fn = init_fn
        self._may_differ = as_paths("may_differ", may_differ)
        self._step_counter: Any = None
        self._read_step: Callable[[], int] | None = None
        self.step_counter = step_counter

        # The step and number of the last save or restore. The number is `None` if an
        # older checkpoint was restored.
        self._last_step: int | None = None
        self._last_number: int | None = None
        # A step, and the folder that holds its values.
        self._holder: tuple[int | None, str] | None = None
        # A step, and its evaluation, if that was the best.
        self._mark: tuple[int | None, Mark] | None = None
        self._is_marking = False  # Whether the save in progress is the best.
        self._best_by = check_best(keep_best, higher_is_better, self._directory)
        self._evaluation: Any = None
        self._writer = Writer(self._directory, max_to_keep, hours)
        self.memory = self._make_memory(memory_interval_seconds, memory_directory)
        """The snapshots in memory, or `None`."""

    def _make_memory(
        self, seconds: float | None, directory: str | os.PathLike[str] | None
    ) -> MemoryTier | None:
        if seconds is None:
            if directory is not None:
                raise ValueError(
                    f"`memory_directory` is {str(directory)!r}, but nothing is kept in "
                    "memory without an interval. Add `memory_interval_seconds=30`."
                )
            return None
        fix = "Use `memory_interval_seconds=30`."
        seconds = check_seconds("memory_interval_seconds", seconds, fix)
        place = check_path("memory_directory", directory or DEFAULT_DIRECTORY)
        if not os.path.isdir(place):
            raise ValueError(
                f"`memory_directory` is {place!r}, but there is no such folder. Use a "
                "folder in memory that exists, such as a `tmpfs`."
            )
        return MemoryTier(
            self._directory, Path(place), seconds, lambda: self._writer.last_saved_at
        )

    @property
    def checkpoints(self) -> list[str]:
        """Paths of all complete checkpoints in the directory, oldest first.

        They include old checkpoints that `keep_checkpoint_every_n_hours` keeps, but not
        a checkpoint that is still being written.
        """
        return [str(entry.path) for entry in find_checkpoints(self._directory)]

    @property
    def latest_checkpoint(self) -> str | None:
        """Path of the complete checkpoint that was saved last, or `None`."""
        return next(reversed(self.checkpoints), None)

    @property
    def best_checkpoint(self) -> str | None:
        """Path of the checkpoint whose evaluation was the best, or `None`."""
        best = read_best(self._directory)
        return None if best is None else str(best.saved.path)

    @property
    def step_counter(self) -> Any:
        """The variable or function that gives the current step, or `None`."""
        return self._step_counter

    @step_counter.setter
    def step_counter(self, step_counter: Any) -> None:
        self._read_step = None
        if step_counter is not None:
            self._read_step = as_step_counter(step_counter, "step_counter")
        self._step_counter = step_counter

    def bind_step_counter(self, step_counter: Any) -> None:
        """Sets the step counter if there is none yet."""
        if self._step_counter is None:
            self.step_counter = step_counter

    def bind_evaluation(self, evaluation: Any) -> None:
        """Also saves and restores the progress of a `Controller`'s evaluation."""
        self._evaluation = evaluation

    def save(
        self, checkpoint_number: int | None = None, check_interval: bool = False
    ) -> str | None:
        """Starts saving the current values.

        It first waits for a save that is still running. It returns once the arrays may
        change again, even by programs that donate them. The folder gets its name when
        it is complete; `sync` waits for that.

        Args:
            checkpoint_number: The number in the name of the folder. By default the
                current step, or, without a step counter, one more than the highest
                number in the directory.
            check_interval: Whether to save only if the last save or restore was at
                least `checkpoint_interval` steps ago.

        Returns:
            The path of the new checkpoint, or `None` if no save is due.

        Raises:
            ValueError: If `checkpoint_number` is not a number for a folder, or if there
                is an interval and no step counter.
            CheckpointError: If this save or the last save failed. Earlier checkpoints
                are kept, and a program may catch this error and continue.
        """
        check_one_of("check_interval", check_interval, (True, False))
        step = self._step()
        if check_interval and not self.is_due(step):
            return None
        self.sync()
        number = step if checkpoint_number is None else checkpoint_number
        if number is None:
            saved = find_checkpoints(self._directory)
            number = max((entry.number for entry in saved), default=0) + 1
        number = check_not_negative_int("checkpoint_number", number)

        mark = None
        if self._mark is not None:
            marked_step, found = self._mark
            mark = found if marked_step == step else None
        path = self._writer.start(number, self.read_content(), mark)
        if self._is_paced:
            interval = self._writer.find_interval(step or 0)
            self.checkpoint_interval = interval or self.checkpoint_interval
        self._last_step = step
        self._last_number = number
        self._is_marking = mark is not None
        self._holder = (step, path)
        return path

    def save_to_memory(self, check_interval: bool = False) -> bool:
        """Keeps the current values in the memory of the machines.

        A `Controller` calls it between loops. It returns once the arrays may change
        again. If the values cannot be kept, the next call logs a warning, and training
        can continue.

        Args:
            check_interval: Whether to do nothing until `memory_interval_seconds` have
                passed since the last time. All processes then wait for process 0 to
                decide.

        Returns:
            Whether values are being kept.

        Raises:
            ValueError: If the manager has no `memory_interval_seconds`.
            CheckpointError: If there is too little memory.
        """
        check_one_of("check_interval", check_interval, (True, False))
        if self.memory is None:
            raise ValueError(
                "`save_to_memory` needs an interval, which also turns on restores from "
                "memory. Use `CheckpointManager(..., memory_interval_seconds=30)`."
            )
        if not check_interval:
            self.memory.sync()
        elif not self.memory.is_due():
            return False
        self.take_snapshot()
        return True

    def take_snapshot(self) -> None:
        """Keeps the values in memory. Call `memory.is_due` or `memory.sync` before."""
        assert self.memory is not None
        if self._is_marking:
            # A run that resumes from the snapshot does not evaluate this step again, so
            # the checkpoint that is marked as the best must exist.
            self.sync()
        self.memory.take(self.read_content(), self._step(), self._last_step)

    def drop_memory(self) -> None:
        """Removes the values in memory, if the disk has newer values.

        A `Controller` calls it at the end of a training. All processes must call it.

        Raises:
            CheckpointError: As in `sync`.
        """
        if self.memory is None:
            return
        self.sync()
        if self.has_saved_step():
            self.memory.drop()

    def note_evaluation(
        self, output: Mapping[str, Any], path: str | None = None
    ) -> bool:
        """Notes the output of an evaluation of the current values.

        A `Controller` calls it. If the output is the best so far by `keep_best`, the
        checkpoint that holds these values is marked as the best. If they are not saved
        yet, the next save of this step is marked.

        Args:
            output: Numbers by name, nested if you like.
            path: The checkpoint that was evaluated, if another job saves checkpoints.

        Returns:
            Whether these values are the best and not saved yet.

        Raises:
            ValueError: If `output` lacks the metric.
            CheckpointError: As in `sync`.
        """
        if self._best_by is None:
            return False
        with announcing_errors():
            mark = make_mark(self._best_by, output)
        if self._is_marking:
            self.sync()
        step = self._step()
        peers = get_peers()
        topic = "whether an evaluation is best"
        if not agree_on(topic, lambda: is_best(mark, self._directory, step), peers):
            return False

        self._mark = (step, mark)
        evaluated_here = path is None
        if self._holder is not None and step is not None:
            held_step, folder = self._holder
            path = folder if held_step == step else path
        if path is None:
            return True  # not saved yet

        self.sync()
        write = functools.partial(self._writer.mark, path, mark, removes=evaluated_here)
        agree_on("the best checkpoint", write, peers)
        return False

    def read_content(self) -> Content:
        """Returns the content that a save would write now."""
        with announcing_errors():
            content = self.checkpoint.read_content()
            if self._evaluation is None:
                return content
            return dataclasses.replace(content, evaluation=self._evaluation.get_state())

    def is_due(self, step: int | None) -> bool:
        """Returns whether `save(check_interval=True)` would save at a step."""
        interval = self.checkpoint_interval
        if interval is None or self._last_step is None or step is None:
            return True
        return step - self._last_step >= interval

    def has_saved_step(self, checkpoint_number: int | None = None) -> bool:
        """Returns whether the latest checkpoint holds the current step.

        This is true if the last save or restore was at this step. The answer is certain
        once `sync` has returned. Without a step counter, it is `False`.

        Args:
            checkpoint_number: The number that was passed to `save`, if any.
        """
        step = self._step()
        number = step if checkpoint_number is None else checkpoint_number
        is_last = (step, number) == (self._last_step, self._last_number)
        return step is not None and is_last

    def restore_or_initialize(self) -> str | None:
        """Restores the latest good checkpoint, or calls `init_fn` if there is none.

        With `memory_interval_seconds`, values in memory that are newer are restored
        instead, if the processes have all of them.

        If a file of a checkpoint is missing, changed or unreadable, that checkpoint is
        skipped with a warning, and the previous checkpoint is restored. A checkpoint
        that does not fit the program is an error, because this is not damage.

        Returns:
            The path that was restored, or `None`.

        Raises:
            CheckpointError: If there are checkpoints, but all of them are damaged, or
                if processes that train together see different checkpoints.
            CheckpointMismatchError: As in `restore`.
        """
        self.sync()
        path = self._restore_from_memory() or self._restore(None)
        if path is not None:
            return path
        logger.info("found no checkpoint in %s.", self._directory)
        if self._init_fn is not None:
            with announcing_errors():
                self._init_fn()
            logger.info("`init_fn` ran, because there is no checkpoint to restore.")
        return None

    def restore_best(self) -> str:
        """Restores the checkpoint whose evaluation was the best, and returns its path.

        Raises:
            CheckpointError: If there is no best checkpoint, or as in `restore`.
            CheckpointMismatchError: As in `restore`.
        """
        self.sync()
        path = agree_on(
            "the best checkpoint", lambda: self.best_checkpoint, get_peers()
        )
        if path is None:
            fix = (
                "Train and evaluate with `CheckpointManager(..., "
                'keep_best="accuracy", higher_is_better=True)`.'
            )
            if self._best_by is not None:
                fix = (
                    f"`keep_best={self._best_by[0]!r}` needs an evaluation: write "
                    "`Controller(evaluator=..., ...)`, and call `train_and_evaluate`."
                )
            raise CheckpointError(
                f"`directory` is {self.directory!r}, in which no checkpoint is known "
                f"as the best. {fix}"
            )
        return self.restore(path)

    def restore(self, path: str | os.PathLike[str]) -> str:
        """Puts all values of one checkpoint into the objects.

        Everything is verified and read before anything is replaced, if memory has room
        for old and new arrays at once. Otherwise about an eighth of the arrays is
        replaced at a time, and an error in between deletes them. Each array goes to the
        devices of the program's own array. The number of devices may differ from the
        number at the save. Data positions are set after all arrays. To restore a part
        of a checkpoint, use `manager.checkpoint.read(path, only=...)`.

        Args:
            path: The folder of the checkpoint, in this directory or elsewhere.

        Returns:
            The path.

        Raises:
            TypeError: If `path` is not a path.
            CheckpointError: If `path` is not a complete checkpoint, cannot be read, or
                is not the same for all processes that train together.
            CheckpointDamageError: If one of its files has changed since the save.
            CheckpointMismatchError: If the checkpoint and the program have different
                leaves, except in parts of `may_differ`. In each case, no object is
                changed.
        """
        folder = as_checkpoint("path", path)
        self.sync()
        return self._restore(folder) or str(folder)

    def _restore_from_memory(self) -> str | None:
        """Restores the newest values in memory, if they are newer than the disk."""
        if self.memory is None:
            return None
        try:
            return self._restore_snapshot(self.memory)
        except (OSError, CheckpointError):
            if not get_peers().is_alone or not self.memory.has_lost_restored():
                raise
            # The training job has just removed it, because there is a newer one.
            return self._restore_from_memory()

    def _restore_snapshot(self, memory: MemoryTier) -> str | None:
        source = memory.find()
        if source is None:
            return None
        notify_launcher("restored", str(source))
        selection = Selection(may_differ=self._may_differ)
        with contextlib.closing(source):
            report, evaluation = restore_from(self.checkpoint, source, selection)
        self._note_restored(report, evaluation)
        if not (report.kept or report.unused):
            # The next save on the disk is due as if nothing had happened.
            self._last_step = source.saved_step
        return report.path

    def _restore(self, folder: epath.Path | None) -> str | None:
        selection = Selection(may_differ=self._may_differ)
        restored = restore(self.checkpoint, self._directory, selection, folder)
        if restored is None:
            return None
        report, evaluation = restored
        self._note_restored(report, evaluation)
        return report.path

    def _note_restored(self, report: RestoreReport, evaluation: Any) -> None:
        # After a partial restore, no checkpoint holds these values, so a save is due.
        self._last_number = None
        self._holder = None
        self._mark = None
        is_here = os.path.dirname(report.path) == self.directory
        holds_all = is_here and not report.kept
        if self._read_step is not None and holds_all:
            self._holder = (self._read_step(), report.path)

        # A position that was refused does not make a save due before the interval ends.
        others = {*report.kept, *report.unused} - self.checkpoint.states.keys()
        if self._read_step is not None and not others:
            self._last_step = self._read_step()
            is_whole = not (report.kept or report.unused)
            if is_whole and report.path == self.latest_checkpoint:
                self._last_number = self._last_step
        if self._evaluation is not None:
            self._evaluation.set_state(evaluation)

    def sync(self) -> None:
        """Waits until the last save is complete and old checkpoints are removed.

        Raises:
            CheckpointError: If that save failed. It is raised once.
        """
        self._is_marking = False
        try:
            self._writer.sync()
        except CheckpointError:
            self._last_number = None
            self._holder = None
            raise

    def close(self) -> None:
        """Waits like `sync`, also for values in memory; the manager can still be used.

        With `memory_interval_seconds`, it also ends the thread that serves other
        processes, until the manager is used again. All processes must call it.

        Raises:
            CheckpointError: As in `sync`.
        """
        try:
            self.sync()
        finally:
            if self.memory is not None:
                self.memory.close()

    def _step(self) -> int | None:
        if self._read_step is None and self.checkpoint_interval is not None:
            raise ValueError(
                "`checkpoint_interval` is given, but there is no "
                "`step_counter` to measure it with. Use "
                "`CheckpointManager(..., step_counter=optimizer.step)`."
            )
        return None if self._read_step is None else self._read_step()
