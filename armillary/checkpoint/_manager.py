"""The manager of a directory of checkpoints: what to save, when, what to restore."""

import dataclasses
import functools
import os
from collections.abc import Callable, Mapping
from typing import Any, Literal

from etils import epath

from armillary._checks import (
    check_callable,
    check_instance,
    check_not_negative,
    check_not_negative_int,
    check_one_of,
    check_positive_int,
)
from armillary._copies import OfOneProcess
from armillary._logging import logger
from armillary.checkpoint._best import Mark, check_best, is_best, make_mark, read_best
from armillary.checkpoint._checkpoint import Checkpoint
from armillary.checkpoint._folder import as_absolute, find_checkpoints
from armillary.checkpoint._reader import restore
from armillary.checkpoint._selection import Paths, Selection, as_paths
from armillary.checkpoint._store import Content
from armillary.checkpoint._writer import Writer, announcing_errors, decide
from armillary.cluster._join import get_peers
from armillary.errors import CheckpointError
from armillary.state._summarize import as_step_counter


class CheckpointManager(OfOneProcess):
    """Saves and restores a `Checkpoint` below one directory.

    One job writes to a directory at a time; others may read it. Folders are named
    `checkpoint_<number>`; saving a number again makes `checkpoint_<number>.1`, and
    removes the older folder once the new one is complete. Everything else in the
    directory (event files, other folders) is left alone, so you can use the directory
    of the run.

    In a job of several processes, all call the same methods: process 0 writes, all
    read, and all must see the directory. Their number may change between runs.

    Args:
        checkpoint: The objects to save.
        directory: Directory of the checkpoints. The first save makes it if it does not
            exist.
        max_to_keep: How many of the newest checkpoints stay; `None` keeps all.
        keep_checkpoint_every_n_hours: A checkpoint that `max_to_keep` would remove
            stays for good if it was saved at least this many hours after the last one
            that did, or after the directory was first used. `None` keeps none.
        keep_best: A metric, such as `"accuracy"`, or `"validation/accuracy"` of several
            evaluators. The checkpoint whose evaluation gave the best value stays, too,
            until there is a better one; ties keep the earlier, and NaN is never best. A
            `Controller` saves a new best that is not saved yet. `None` keeps none.
        higher_is_better: Whether a larger value of `keep_best` is better: true for an
            accuracy, false for a loss.
        step_counter: A variable such as `optimizer.step`, or a function without
            arguments, that gives the current step. A `Controller` binds its global step
            if this is `None`.
        checkpoint_interval: Steps between saves that ask for `check_interval`; it needs
            a step counter. `"auto"` saves as often as costs little: training waits for
            saves 1 % of its time, they are written 10 % of it, and begin at least 10
            seconds apart. `None` lets every save through.
        init_fn: Called by `restore_or_initialize` if there is no checkpoint. To begin
            with a pretrained part:
            `init_fn=lambda: checkpoint.read(path, only="model/encoder")`.
        may_differ: Parts, by path, that changed between two runs: an optimizer
            (`"optimizer/opt_state"`), averages of weights, data that has grown
            (`"train_dataset"`). One that a checkpoint lacks, or has otherwise, stays
            whole as the program made it, with a warning; one that fits is restored.

    Raises:
        TypeError: If an argument is of the wrong type.
        ValueError: If a number is out of range, a path of `may_differ` is empty, or
            `keep_best` is without `higher_is_better`, or not as in the directory.
    """

    _why_not_copied = "it writes one directory of this process"
    _copy_instead = (
        "Make another `CheckpointManager` in the process that uses it, with the "
        "objects that are there."
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
    ) -> None:
        hours, interval = keep_checkpoint_every_n_hours, checkpoint_interval
        fix = "Use `Checkpoint(model=model, optimizer=optimizer)`."
        check_instance("checkpoint", checkpoint, Checkpoint, fix)
        if max_to_keep is not None:
            max_to_keep = check_positive_int("max_to_keep", max_to_keep)
        if hours is not None:
            check_not_negative("keep_checkpoint_every_n_hours", hours)
        self._is_paced = isinstance(interval, str) and interval == "auto"
        if interval is not None:
            interval, fix = 1 if self._is_paced else interval, 'Or use `"auto"`.'
            interval = check_positive_int("checkpoint_interval", interval, fix=fix)
        if init_fn is not None:
            check_callable("init_fn", init_fn)
        self.checkpoint = checkpoint
        """The `Checkpoint` that is saved."""
        self.checkpoint_interval = interval
        """Steps between saves that ask for `check_interval`; `"auto"` changes them."""
        self._directory = as_absolute("directory", directory)
        self.directory = str(self._directory)
        """The absolute path of the directory."""
        self._init_fn = init_fn
        self._may_differ = as_paths("may_differ", may_differ)
        self._step_counter: Any = None
        self._read_step: Callable[[], int] | None = None
        self.step_counter = step_counter
        # Of the last save or restore. There is no number if an older one was restored.
        self._last_step: int | None = None
        self._last_number: int | None = None
        # By step: the folder with its values, and its evaluation, if that was the best.
        self._holder: tuple[int | None, str] | None = None
        self._mark: tuple[int | None, Mark] | None = None
        self._is_marking = False  # A save that is running is the best.
        self._best_by = check_best(keep_best, higher_is_better, self._directory)
        self._evaluation: Any = None
        self._writer = Writer(self._directory, max_to_keep, hours)

    @property
    def checkpoints(self) -> list[str]:
        """Paths of all complete checkpoints in the directory, oldest first.

        Old ones that `keep_checkpoint_every_n_hours` keeps are among them; one that is
        still being written is not.
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
        """Saves and restores how far the evaluation of a `Controller` is, too."""
        self._evaluation = evaluation

    def save(
        self, checkpoint_number: int | None = None, check_interval: bool = False
    ) -> str | None:
        """Starts saving the current values.

        Returns once the arrays may change again, also by programs that they are donated
        to; the folder gets its name when it is complete. A save that is still running
        is waited for first. `sync` waits for this one.

        Args:
            checkpoint_number: The number in the name of the folder. By default the
                current step, or, without a step counter, one more than the highest
                number in the directory.
            check_interval: Whether to save only if the last save or restore was at
                least `checkpoint_interval` steps ago.

        Returns:
            The path it is going to have, or `None` if it is not due.

        Raises:
            ValueError: If `checkpoint_number` is not a number for a folder, or if there
                is an interval and no step counter.
            CheckpointError: If it cannot be written, or the last one could not be.
                Earlier checkpoints stay, and a program that catches this may go on.
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
        step = self._step()
        mark = self._mark[1] if self._mark and self._mark[0] == step else None
        path = self._writer.start(number, self.read_content(), mark)
        if self._is_paced and (interval := self._writer.find_interval(step or 0)):
            self.checkpoint_interval = interval
        self._last_step, self._last_number = step, number
        self._is_marking, self._holder = mark is not None, (step, path)
        return path

    def note_evaluation(
        self, output: Mapping[str, Any], path: str | None = None
    ) -> bool:
        """Says what an evaluation of the current values gave; a `Controller` does so.

        If it is the best so far by `keep_best`, the checkpoint that holds these values
        is marked. If there is none, the next save of this step is.

        Args:
            output: Numbers by name, nested if you like.
            path: The checkpoint that was evaluated, if another job saves them.

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
        step, peers, topic = self._step(), get_peers(), "whether an evaluation is best"
        if not decide(topic, lambda: is_best(mark, self._directory, step), peers):
            return False
        self._mark, is_own, held = (step, mark), path is None, self._holder
        if held is not None and step is not None and held[0] == step:
            path = held[1]
        if path is None:
            return True
        self.sync()
        write = functools.partial(self._writer.mark, path, mark, removes=is_own)
        decide("the best checkpoint", write, peers)
        return False

    def read_content(self) -> Content:
        """Returns what a save would write now; a `Controller` keeps it for later."""
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
            checkpoint_number: The number that `save` was given, if it was given one.
        """
        step = self._step()
        number = step if checkpoint_number is None else checkpoint_number
        is_last = (step, number) == (self._last_step, self._last_number)
        return step is not None and is_last

    def restore_or_initialize(self) -> str | None:
        """Restores the latest good checkpoint, or calls `init_fn` if there is none.

        A checkpoint with a file that is missing, changed or cannot be read is skipped
        with a warning, and the one before it is taken. One that does not fit the
        program is an error: that is not damage.

        Returns:
            The path that was restored, or `None`.

        Raises:
            CheckpointError: If there are checkpoints and all of them are damaged, or
                processes that train together do not see the same one.
            CheckpointMismatchError: As in `restore`.
        """
        self.sync()
        path = self._restore(None)
        if path is not None:
            return path
        logger.info("found no checkpoint in %s.", self._directory)
        if self._init_fn is not None:
            with announcing_errors():
                self._init_fn()
            logger.info("`init_fn` ran, as there is no checkpoint to restore.")
        return None

    def restore_best(self) -> str:
        """Restores the checkpoint whose evaluation was the best, and returns its path.

        Raises:
            CheckpointError: If there is none, or as in `restore`.
            CheckpointMismatchError: As in `restore`.
        """
        self.sync()
        path = decide("the best checkpoint", lambda: self.best_checkpoint, get_peers())
        if path is None:
            raise CheckpointError(
                f"`directory` is {self.directory!r}, in which no checkpoint is known "
                "as the best. Train and evaluate with `CheckpointManager(..., "
                'keep_best="accuracy", higher_is_better=True)`.'
            )
        return self.restore(path)

    def restore(self, path: str | os.PathLike[str]) -> str:
        """Puts the values of one checkpoint into the objects, with nothing left in it.

        Everything is verified and read before anything is written. Each array goes to
        the devices of the program's own array. Their number may differ from the number
        at the save. Data positions are set after all arrays. To restore a part of a
        checkpoint, use `manager.checkpoint.read(path, only=...)`.

        Args:
            path: The folder of the checkpoint, in this directory or elsewhere.

        Returns:
            The path.

        Raises:
            TypeError: If `path` is not a path.
            CheckpointError: If `path` is not a complete checkpoint, cannot be read, or
                is not the same one for processes that train together.
            CheckpointDamageError: If a file of it has changed since the save.
            CheckpointMismatchError: If it holds other leaves than the program, except
                in parts that `may_differ`. The objects are unchanged in each case.
        """
        folder = as_absolute("path", path)
        self.sync()
        return self._restore(folder) or str(folder)

    def _restore(self, folder: epath.Path | None) -> str | None:
        selection = Selection(may_differ=self._may_differ)
        restored = restore(self.checkpoint, self._directory, selection, folder)
        if restored is None:
            return None
        report, evaluation = restored
        # What was restored in part is on no disk, so that a save is due.
        self._last_number = self._holder = self._mark = None
        is_here = os.path.dirname(report.path) == self.directory
        if self._read_step is not None and is_here and not report.kept:
            self._holder = self._read_step(), report.path
        # A position that was refused is no reason to save before the interval is over.
        others = {*report.kept, *report.unused} - self.checkpoint.states.keys()
        if self._read_step is not None and not others:
            self._last_step = self._read_step()
            is_whole = not (report.kept or report.unused)
            if is_whole and report.path == self.latest_checkpoint:
                self._last_number = self._last_step
        if self._evaluation is not None:
            self._evaluation.set_state(evaluation)
        return report.path

    def sync(self) -> None:
        """Waits until the last save is complete and old checkpoints are removed.

        Raises:
            CheckpointError: If that save failed. It is raised once.
        """
        self._is_marking = False
        try:
            self._writer.sync()
        except CheckpointError:
            self._last_number = self._holder = None
            raise

    def close(self) -> None:
        """Waits like `sync`; the manager can still be used."""
        self.sync()

    def _step(self) -> int | None:
        if self._read_step is None and self.checkpoint_interval is not None:
            raise ValueError(
                "`checkpoint_interval` is given, but there is no "
                "`step_counter` to measure it with. Use "
                "`CheckpointManager(..., step_counter=optimizer.step)`."
            )
        return None if self._read_step is None else self._read_step()
