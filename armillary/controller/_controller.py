"""The outer loop: trains, evaluates, saves, restores, logs and stops.

A *loop* is one call of `trainer.train`. All other work happens at the boundary between
two loops, in the order of `LoopRunner.train_until`.
"""

import contextlib
import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from armillary._checks import (
    check_callable,
    check_not_negative,
    check_num_steps,
    check_one_of,
    check_path,
    check_positive_int,
)
from armillary._copy_refusal import OfOneProcess
from armillary._logging import ensure_visible
from armillary._traceback import hides_frames
from armillary.actions._combined import as_actions, notify
from armillary.controller._arguments import (
    check_arguments,
    check_evaluations_end,
    check_target,
    require,
)
from armillary.controller._attempt import describe_attempt
from armillary.controller._directory import end_training, training_in
from armillary.controller._display import Display
from armillary.controller._evaluations import run_evaluations
from armillary.controller._history import History, RunOutput
from armillary.controller._loops import LoopRunner
from armillary.controller._run import Run, finishing, is_reached
from armillary.controller._saving import Saving, restore_if_good
from armillary.controller._speeds import Speeds
from armillary.controller._unsaved import warn_of_uncalled, warn_of_unsaved
from armillary.controller._warnings import warn_of_bad_arrays, warn_of_evaluators
from armillary.lifeline._lifeline import get_lifeline
from armillary.summary._summary_manager import SummaryManager
from armillary.trainer._claims import claimed
from armillary.trainer._contract import AbstractEvaluator, AbstractTrainer
from armillary.typing import Action, Output

if TYPE_CHECKING:
    from armillary.checkpoint._manager import CheckpointManager
    from armillary.distribute._strategy import Strategy


class Controller(OfOneProcess):
    """Runs the outer loop around a trainer and an evaluator.

    Training is, in short::

        restore the latest checkpoint                   # when constructed
        while global_step < steps and nobody asked to stop and data is left:
            output = trainer.train(num_steps)           # at most steps_per_loop
            log(output); write_summaries(output)
            for action in train_actions: action(output)
            checkpoint_manager.save(check_interval=True)
        checkpoint_manager.save()

    You can call these methods several times. Each call continues at the global step
    that the last call reached. If your code raises an exception, the controller flushes
    summaries and completes pending saves before the exception reaches you. If the
    program configured no logging, a controller makes the `armillary` logger print to
    stderr.

    Args:
        global_step: The counter of training steps: a variable that the steps advance,
            such as `optimizer.step`, or a function without arguments that returns the
            step.
        trainer: Runs the training steps. Needed by `train` and `train_and_evaluate`.
        evaluator: Runs evaluations. A dictionary holds several evaluators by name, such
            as `{"validation": a, "test": b}`. They run in this order, and each has an
            output and a directory of summaries under its name.
        strategy: The trainer, the evaluator, actions and restores run in the scope of
            this strategy.
        train_actions: One action or several, called with the output of each loop.
        eval_actions: Called with the output of each evaluation, after it is logged.
        steps_per_loop: Steps in one call of `trainer.train`, or a function from the
            global step to that number. Required with a trainer. A larger value hides
            more Python time, and delays logging, saving and stopping by as many steps.
        checkpoint_manager: Saves and restores checkpoints. It always saves at the end,
            and during training if it has a `checkpoint_interval`.
        summary_interval: Steps between training summaries, a multiple of
            `steps_per_loop`. `None` writes them after each loop.
        log_interval: Steps between log lines of training, a multiple of
            `steps_per_loop`. The last loop before an evaluation and at the end is
            logged as well. `None` logs each loop.
        summary_dir: Directory of the training summaries.
        eval_summary_dir: Directory of the evaluation summaries. `None` uses
            `summary_dir`.
        summary_manager: Used instead of a manager for `summary_dir`.
        eval_summary_manager: Used instead of a manager for `eval_summary_dir`.
        hyperparameters: Names and numbers, nested if you like, for TensorBoard's page
            of hyperparameters and for the record of the run.
        hang_timeout_seconds: Seconds without progress after which the program prints
            the stacks of all its processes, and exits with
            `ExitCode.RESTART_REQUESTED`. `None` takes five times the longest loop,
            evaluation, save or action so far, at least 300, and a single process may
            wait without a limit for its own data and actions; `math.inf` waits forever.
            XLA's compiler may take any time.
        progress: Whether to keep one live line in a terminal. If stderr is not a
            terminal, phases that take longer than 30 seconds are logged instead.
        tokens_per_example: Tokens of one example, such as the length of a sequence, for
            tokens per second. With it or `peak_flops`, log lines of training have
            tokens per second, TFLOP/s and MFU, as far as they are known.
        peak_flops: Peak FLOP/s of one device, such as `989e12`, for MFU (model FLOPs
            utilization). `None` uses the dense bfloat16 peak of a TPU or an NVIDIA GPU
            that is known.

    Arguments are attributes, too, for reading only.
    """

    _why_not_copied = "it runs the trainer and writes the files of this process"
    _copy_instead = (
        "Make the model, the trainer and the controller in the process that uses "
        "them, such as in the function that a search over hyperparameters calls."
    )

    @hides_frames
    def __init__(
        self,
        *,
        global_step: Any,
        trainer: AbstractTrainer | None = None,
        evaluator: AbstractEvaluator | Mapping[str, AbstractEvaluator] | None = None,
        strategy: "Strategy | None" = None,
        train_actions: Action | Iterable[Action] | None = (),
        eval_actions: Action | Iterable[Action] | None = (),
        steps_per_loop: int | Callable[[int], int] | None = None,
        checkpoint_manager: "CheckpointManager | None" = None,
        summary_interval: int | None = None,
        log_interval: int | None = None,
        summary_dir: str | os.PathLike[str] | None = None,
        eval_summary_dir: str | os.PathLike[str] | None = None,
        summary_manager: SummaryManager | None = None,
        eval_summary_manager: SummaryManager | None = None,
        hyperparameters: Mapping[str, Any] | None = None,
        hang_timeout_seconds: float | None = None,
        progress: bool = True,
        tokens_per_example: int | None = None,
        peak_flops: float | None = None,
    ) -> None:
        check_arguments(locals())
        self.global_step = global_step
        self.trainer = trainer
        self.evaluator = evaluator
        self.strategy = strategy
        # `None` is Orbit's default.
        train_actions = () if train_actions is None else train_actions
        eval_actions = () if eval_actions is None else eval_actions
        self.train_actions = as_actions("train_actions", train_actions)
        self.eval_actions = as_actions("eval_actions", eval_actions)
        self.checkpoint_manager = checkpoint_manager
        self.summary_interval = summary_interval
        self.log_interval = log_interval
        self.hang_timeout_seconds = hang_timeout_seconds
        self.progress = progress
        self.tokens_per_example = tokens_per_example
        self.peak_flops = peak_flops
        self.hyperparameters = dict(hyperparameters or {})
        self.summary_manager = summary_manager or self._make_manager(summary_dir)
        self.eval_summary_manager = eval_summary_manager or self.summary_manager
        has_own_dir = _are_different(summary_dir, eval_summary_dir)
        if eval_summary_manager is None and has_own_dir:
            self.eval_summary_manager = self._make_manager(eval_summary_dir)

        run = Run(self, steps_per_loop)
        self._run = run
        self._display = Display(run, progress)
        self._saving = Saving(run, checkpoint_manager)
        speeds = Speeds(tokens_per_example, peak_flops)
        self._loops = LoopRunner(run, self._saving, self._display, speeds)
        self._has_begun = False

        ensure_visible()
        warn_of_evaluators(trainer, evaluator)
        is_resumed = False
        if checkpoint_manager is not None:
            checkpoint_manager.bind_step_counter(global_step)
            if trainer is not None:
                checkpoint_manager.bind_evaluation(self._saving)
                warn_of_unsaved(self._actions, trainer, checkpoint_manager.checkpoint)
                warn_of_uncalled(self._actions, checkpoint_manager.checkpoint)
            is_resumed = self.restore_checkpoint() is not None
        get_lifeline().stop_watching_start()

        notify(self._actions, "bind_step_counter", global_step)
        if is_resumed and trainer is not None:
            evaluated = self._saving.evaluated or 0
            notify(self.eval_actions, "resume_at", evaluated)

    @property
    def steps_per_loop(self) -> int | None:
        """Steps in the next loop, or `None` for a controller without a trainer."""
        if self._run.steps_per_loop is None:
            return None
        return self._loops.num_steps_at(self._run.read_step())

    @hides_frames
    def train(
        self,
        steps: int = -1,
        checkpoint_at_completion: bool = True,
        *,
        epochs: int | None = None,
    ) -> History:
        """Trains up to a global step, until the data ends or a stop is requested.

        Args:
            steps: The global step to train up to, not a number of further steps. -1
                sets no limit.
            checkpoint_at_completion: Whether to save at the end, unless the last loop
                did. After a stop request, training always saves.
            epochs: The total number of passes over the training data. Passes that were
                completed before, also before a restore, count. `None` makes one pass.

        Returns:
            The scalars of the loops of this call; see `History`.

        Raises:
            ValueError: If `steps` lies before the global step, or if `epochs` cannot be
                counted, as with data that repeats itself.
            GlobalStepError: If a loop did not advance the global step by its steps.
            ThreadError: If another thread runs steps with the same state.
        """
        require(self, "trainer", for_method="train")
        may_be_past = self._loops.may_pass_target()
        step = self._run.read_step()
        check_target("steps", steps, step, epochs, may_be_past=may_be_past)
        name = "checkpoint_at_completion"
        check_one_of(name, checkpoint_at_completion, (True, False))
        self._saving.expect_evaluation(None)
        with self._training(steps):
            goes_on = self._loops.begin_epoch(epochs)
            while goes_on:
                goes_on = self._loops.train_until(steps, epochs)
                is_done = is_reached(self._run.read_step(), steps)
                goes_on = goes_on and not is_done
            if checkpoint_at_completion or self._run.stop.is_agreed():
                self._saving.finish()
        return self._run.take_history()

    @hides_frames
    def evaluate(self, steps: int = -1) -> Output:
        """Evaluates once, at the current state.

        Args:
            steps: Steps to evaluate. -1 runs until the evaluation data ends.

        Returns:
            The output of the evaluator, with NumPy values; empty if it returned
            `None`. With several evaluators, a dictionary of outputs by name.
        """
        require(self, "evaluator", for_method="evaluate")
        check_num_steps("steps", steps)
        return self._evaluate(steps, self.eval_actions)

    @hides_frames
    def train_and_evaluate(
        self,
        train_steps: int = -1,
        eval_steps: int = -1,
        eval_interval: int | None = None,
        *,
        epochs: int | None = None,
    ) -> RunOutput:
        """Trains and evaluates in turns, and evaluates at the end.

        Evaluations run at multiples of `eval_interval`, even if the run was
        interrupted, and at the ends of `epochs`. The last step is evaluated exactly
        once. It is `train_steps`, or the step at which the data ended or a stop was
        requested.

        If a save is due, the step is saved before it is evaluated. A run that resumes
        from this checkpoint evaluates first. A new best step (`keep_best` of the
        manager) is saved after its evaluation. The last step is saved again if its
        evaluation, or an action, has changed a saved value.

        Args:
            train_steps: As `steps` in `train`.
            eval_steps: As `steps` in `evaluate`.
            eval_interval: Training steps between evaluations. A loop that would run
                past an evaluation is shortened. `None` evaluates only at the end of
                each epoch and at the end of training.
            epochs: As in `train`.

        Returns:
            The output of the last evaluation, as a dictionary. Its attribute `history`
            has the scalars of all loops and evaluations of this call.
        """
        require(self, "trainer", "evaluator", for_method="train_and_evaluate")
        may_be_past = self._loops.may_pass_target()
        step = self._run.read_step()
        check_target("train_steps", train_steps, step, epochs, may_be_past=may_be_past)
        check_num_steps("eval_steps", eval_steps)
        check_evaluations_end(self.evaluator, eval_steps)
        if eval_interval is not None:
            check_positive_int("eval_interval", eval_interval)

        output: Output = None
        with self._training(train_steps):
            goes_on = self._loops.begin_epoch(epochs)
            # A checkpoint may have been saved before the evaluation of its step.
            is_left = self._saving.is_evaluation_due()
            if is_left:
                self._run.drop_evaluation(step)
            while True:
                if goes_on and not is_left:
                    target = self._find_next_evaluation(train_steps, eval_interval)
                    self._saving.expect_evaluation(target)
                    goes_on = self._loops.train_until(target, epochs)
                is_left = False
                step = self._run.read_step()
                goes_on = goes_on and not is_reached(step, train_steps)

                if step != self._saving.evaluated:
                    with self._saving.evaluation(is_last=not goes_on):
                        actions = self._saving.pending_actions(self.eval_actions)
                        output = self._evaluate(eval_steps, actions)
                elif output is None:
                    # Training was complete before this call, but the output is needed.
                    output = self._evaluate(eval_steps, ())

                if not goes_on or self._run.stop.is_agreed():
                    break
            # An action of the evaluation may have asked to stop.
            self._saving.finish()
        return RunOutput(output or {}, self._run.take_history())

    @hides_frames
    def evaluate_continuously(
        self,
        steps: int = -1,
        timeout: float | None = None,
        timeout_fn: Callable[[], bool] | None = None,
        until_step: int | None = None,
    ) -> Output:
        """Evaluates every checkpoint that appears in the manager's directory.

        Starts with the existing checkpoints, oldest first, and evaluates each once. A
        checkpoint that is damaged, or deleted before it is restored, is skipped with a
        warning. If the manager has `keep_best`, the evaluation records in the directory
        which checkpoint is the best, and the training job keeps it. Nothing else is
        written to the directory.

        The method also returns when the training program has ended without an error and
        its last checkpoint is evaluated. The directory then contains a file `DONE`. If
        this file exists from the start, it counts only after five minutes, because a
        training program that continues deletes it.

        Args:
            steps: As in `evaluate`.
            timeout: Seconds to wait for a new checkpoint. `None` waits forever.
            timeout_fn: Called after each timeout. If it returns true, no checkpoint
                will follow and the method returns. `None` returns after the first
                timeout.
            until_step: The last global step of training. The method returns once a
                checkpoint of this step, or of a later step, is evaluated.

        Returns:
            The output of the last evaluation, or `None` if there was none.
        """
        method = "evaluate_continuously"
        require(self, "evaluator", "checkpoint_manager", for_method=method)
        check_num_steps("steps", steps)
        if timeout is not None:
            check_not_negative("timeout", timeout)
        if timeout_fn is not None:
            check_callable("timeout_fn", timeout_fn)
        if until_step is not None:
            check_positive_int("until_step", until_step)

        self._run.stop.clear()
        # The constructor restored the latest checkpoint, but the oldest comes first.
        notify(self.eval_actions, "resume_at", 0)
        output: Output = None
        for path in self._saving.watch(timeout, timeout_fn):
            if not restore_if_good(self.restore_checkpoint, path):
                continue
            output = self.evaluate(steps)
            if until_step is not None and self._run.read_step() >= until_step:
                break
        self._run.log_stop()
        return output

    @hides_frames
    def save_checkpoint(self) -> str:
        """Saves a checkpoint now, waits until it is on disk, and returns its path."""
        require(self, "checkpoint_manager", for_method="save_checkpoint")
        with self._display.on("train", self._run.read_step()), self._watch():
            path = self._saving.save()
            self._saving.sync()
            return str(path)

    @hides_frames
    def restore_checkpoint(
        self, path: str | os.PathLike[str] | None = None
    ) -> str | None:
        """Restores a checkpoint; returns its path, or `None` if there is none.

        Args:
            path: The checkpoint. `None` takes the latest one; if there is none, the
                checkpoint manager's `init_fn` runs.
        """
        require(self, "checkpoint_manager", for_method="restore_checkpoint")
        with self._display.on("train", self._run.read_step()), self._watch():
            return self._saving.restore(path)

    def request_stop(self, reason: str) -> None:
        """Stops training or evaluation at the next boundary of loops, after a save.

        It may be called from actions, other threads and signal handlers. If one of
        several processes requests a stop, all stop at the same step. The first reason
        is logged at the end. The next call of `train` clears the request.

        Args:
            reason: The reason for the stop, for the log.
        """
        self._run.stop.make(reason)

    @property
    def _actions(self) -> tuple[Action, ...]:
        return *self.train_actions, *self.eval_actions

    def _make_manager(self, directory: Any) -> SummaryManager:
        manager = SummaryManager(directory)
        # Its files stay open between calls, so they are closed with the controller.
        weakref.finalize(self, manager.close)
        return manager

    def _evaluate(self, steps: int, actions: Iterable[Action]) -> dict[str, Any]:
        run = self._run
        with self._display.on("eval", run.read_step()), self._watch():
            return run_evaluations(run, self._saving, self.evaluator, steps, actions)

    def _watch(self) -> contextlib.AbstractContextManager[None]:
        """Ends the process, from another thread, if a block hangs."""
        find_phase = self._run.goodput.find_phase
        return get_lifeline().watching(self.hang_timeout_seconds, find_phase)

    @contextlib.contextmanager
    def _training(self, target: int) -> Iterator[None]:
        """Begins a call that trains, and completes all writes at its end."""
        run = self._run
        step = run.read_step()
        with (
            claimed(self.trainer, "trains"),
            training_in(run.directory),
            self._saving.training(),
            run.goodput.run(step, lambda: run.stop.reason is None),
            self._display.on("train", step, target),
        ):
            run.stop.clear()
            run.history = History()
            self._record_start(step)
            finishes = (self._end_actions, self._finish_writes)
            with finishing(self._loops.report, *finishes), self._watch():
                with run.scope():
                    notify(self._actions, "begin_training")
                yield

            self._saving.drop_memory()
            reached = run.read_step()
            if reached > step and not run.history:
                warn_of_bad_arrays(self.trainer, reached)
            end_training(run.directory, reached)
        run.log_stop()

    def _record_start(self, step: int) -> None:
        """Writes the first record of an attempt, unless training only continues."""
        curves = self._run.curves
        numbers = self.hyperparameters
        is_first = not self._has_begun
        self._has_begun = True

        write = getattr(curves.summary_manager, "write_hyperparameters", None)
        if is_first and numbers and write is not None:
            write(numbers)

        # If a checkpoint was restored, training may continue at an earlier step.
        file = curves.file
        files = {file, self._run.eval_curves.file}
        # With a `summary_interval`, the last record may be an evaluation.
        last_step = max(each.last_step for each in files)
        if is_first or step < last_step:
            if file.is_on:
                file.write("start", step, **describe_attempt(self._run, numbers))
                file.flush()
            for each in files:
                each.last_step = step

    def _find_next_evaluation(self, train_steps: int, eval_interval: int | None) -> int:
        """Returns the global step of the next evaluation, or -1 for an open end."""
        if eval_interval is None:
            return train_steps
        next_eval = (self._run.read_step() // eval_interval + 1) * eval_interval
        return next_eval if train_steps == -1 else min(next_eval, train_steps)

    def _end_actions(self) -> None:
        with self._run.scope():
            notify(self._actions, "end_training")

    def _finish_writes(self) -> None:
        self._run.curves.flush()
        self._run.eval_curves.flush()
        self._saving.sync()


def _are_different(summary_dir: Any, eval_summary_dir: Any) -> bool:
    """Returns whether evaluations have a directory of their own."""
    if eval_summary_dir is None:
        return False
    if summary_dir is None:
        return True
    own = check_path("eval_summary_dir", eval_summary_dir)
    return own != check_path("summary_dir", summary_dir)
