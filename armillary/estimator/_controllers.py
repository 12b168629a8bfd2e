"""Makes the controller of one call of an estimator.

A call such as `train` builds the model for its data, and runs in a `Controller` of its
own. The controller restores the latest checkpoint of the estimator's directory.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

from armillary._logging import logger
from armillary.checkpoint._checkpoint import Checkpoint
from armillary.checkpoint._folder import as_absolute, find_checkpoints
from armillary.controller._controller import Controller
from armillary.data._layout import InputContext
from armillary.distribute.replica._context import get_strategy
from armillary.errors import EstimatorError
from armillary.estimator._hooks import (
    HookAction,
    ListenedManager,
    PeriodicCall,
    as_hooks,
)
from armillary.estimator._model_fn import EstimatorSpec, ModeKeys, Model
from armillary.estimator._run_config import Listener, RunConfig, check_call
from armillary.estimator._runners import (
    EstimatorEvaluator,
    EstimatorTrainer,
    InputPosition,
    distribute,
    make_input,
)
from armillary.parameter_server._strategy import ParameterServerStrategy
from armillary.typing import Action


@dataclasses.dataclass(frozen=True)
class Calls:
    """The functions that one call of an estimator runs.

    Attributes:
        train_input_fn: The input function for training; `None` if it does not train.
        train_hooks: The hooks of training.
        saving_listeners: The functions that get the path of each checkpoint.
        resumes: Whether training continues in the data at the checkpoint's position.
        when_save_is_due: Is called when `save_checkpoints_secs` have passed. If it is
            `None`, a checkpoint is saved.
        eval_input_fn: The input function for evaluations; `None` if it evaluates
            nothing.
        eval_name: The name of the evaluations.
        eval_hooks: The hooks of evaluations.
        after_evaluation: Actions that run after the hooks of an evaluation.
    """

    train_input_fn: Callable[..., Any] | None = None
    train_hooks: tuple[Action, ...] = ()
    saving_listeners: tuple[Listener, ...] = ()
    resumes: bool = False
    when_save_is_due: Callable[[], Any] | None = None
    eval_input_fn: Callable[..., Any] | None = None
    eval_name: str | None = None
    eval_hooks: tuple[Action, ...] = ()
    after_evaluation: tuple[Action, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class ControllerMaker:
    """An estimator's model, settings and directory, from which controllers are made.

    Attributes:
        model: The model, which is built for the data of the call.
        config: The settings.
        params: The parameters for model functions and input functions.
        model_dir: The directory of the checkpoints.
        path: The checkpoint to read in place of the latest one, if the user named one.
        warm_start_from: The checkpoint or directory to begin with, if there is no
            checkpoint yet.
    """

    model: Model
    config: RunConfig
    params: Any
    model_dir: str
    path: str | None
    warm_start_from: Any

    def make(
        self, calls: Calls, eval_summary_dir: str
    ) -> tuple[Controller, ListenedManager | None]:
        """Returns the controller and its manager, and restores a checkpoint.

        Args:
            calls: The functions to run.
            eval_summary_dir: The directory for summaries of evaluations.
        """
        config = self.config
        position = InputPosition()
        train_hooks = calls.train_hooks
        eval_hooks = calls.eval_hooks
        trainer = None
        evaluator = None

        if calls.train_input_fn is not None:
            trainer, position = self._make_trainer(calls)
            spec = self.model.train_spec
            assert spec is not None  # The trainer has built the model.
            train_hooks += as_hooks("training_hooks", spec.training_hooks)
            chief_hooks = as_hooks("training_chief_hooks", spec.training_chief_hooks)
            train_hooks += chief_hooks if config.is_chief else ()
        if calls.eval_input_fn is not None:
            evaluator, spec = self._make_evaluator(calls.eval_input_fn)
            eval_hooks += as_hooks("evaluation_hooks", spec.evaluation_hooks)

        optimizer = self.model.optimizer
        assert optimizer is not None  # The trainer or the evaluator has built it.
        hooks = HookAction(train_hooks)
        eval_actions = HookAction(eval_hooks)
        checkpoint = Checkpoint(
            model=self.model.modules,
            optimizer=optimizer,
            input=position,
            hooks=hooks,
            eval_hooks=eval_actions,
        )
        manager = self._make_manager(calls, checkpoint)

        # A loop without actions need not wait for the output of the loop before.
        train_actions: list[Action] = [hooks] if train_hooks else []
        seconds = config.save_checkpoints_secs
        manager_of_training = manager if trainer is not None else None
        if manager_of_training is not None and seconds is not None:
            when_due = calls.when_save_is_due or manager_of_training.save
            train_actions.append(PeriodicCall(seconds, when_due))

        summary_interval = config.save_summary_steps if trainer else None
        controller = Controller(
            trainer=trainer,
            evaluator=evaluator,
            global_step=optimizer.step,
            train_actions=train_actions,
            eval_actions=[eval_actions, *calls.after_evaluation],
            steps_per_loop=config.steps_per_loop if trainer else None,
            summary_interval=summary_interval,
            summary_dir=None if summary_interval is None else self.model_dir,
            eval_summary_dir=eval_summary_dir,
            checkpoint_manager=manager,
        )
        return controller, manager

    def bind(
        self, input_fn: Callable[..., Any], mode: ModeKeys
    ) -> Callable[[InputContext], Any]:
        """Returns a function that calls an input function with its arguments."""
        check_call(input_fn)
        values = {"mode": mode, "params": self.params, "config": self.config}
        return functools.partial(make_input, input_fn, values)

    def find_warm_start(self) -> str | None:
        """Returns the path of the checkpoint to begin with, if there is one."""
        if self.warm_start_from is None:
            return None
        folder = as_absolute("warm_start_from", self.warm_start_from)
        saved = find_checkpoints(folder)
        return str(saved[-1].path if saved else folder)

    def _make_trainer(self, calls: Calls) -> tuple[EstimatorTrainer, InputPosition]:
        """Builds the model for training; returns its trainer and the data position."""
        config = self.config
        if not config.plan.is_training:
            raise EstimatorError(
                f"`train` was called in the task {config.task_type} {config.task_id}, "
                "which does not train. Call `armillary.estimator.train_and_evaluate` "
                "in all processes."
            )
        assert calls.train_input_fn is not None
        strategy = config.train_distribute or get_strategy()
        make_data = self.bind(calls.train_input_fn, ModeKeys.TRAIN)
        dataset, specs = distribute(make_data, strategy, is_training=True)
        self.model.build_training(*specs)

        # Workers of parameter servers take batches when they are free, in any order.
        has_position = not isinstance(strategy, ParameterServerStrategy)
        position = InputPosition(
            dataset if has_position else None, resumes=calls.resumes
        )
        return EstimatorTrainer(dataset, strategy, self.model), position

    def _make_evaluator(
        self, input_fn: Callable[..., Any]
    ) -> tuple[EstimatorEvaluator, EstimatorSpec]:
        """Builds the model for evaluation; returns its evaluator and the spec."""
        strategy = self.config.eval_distribute
        joint = self.config.train_distribute
        if strategy is None and joint is not None:
            # Processes that train together also evaluate together.
            strategy = None if joint.layout.peers.is_alone else joint
        strategy = strategy or get_strategy()
        make_data = self.bind(input_fn, ModeKeys.EVAL)
        dataset, specs = distribute(make_data, strategy, is_training=False)

        # The checkpoint also holds the optimizer, so the model is built for training.
        self.model.build_training(*specs)
        spec = self.model.build(*specs, ModeKeys.EVAL)
        evaluator = EstimatorEvaluator(
            dataset, strategy, self.model, spec.eval_metric_ops
        )
        return evaluator, spec

    def _make_manager(
        self, calls: Calls, checkpoint: Checkpoint
    ) -> ListenedManager | None:
        """Returns the manager of the model's directory.

        If the user named a checkpoint, it is read instead, and there is no manager.
        """
        if self.path is not None:
            checkpoint.read(self.path, only=("model", "optimizer/step"))
            return None
        config = self.config
        return ListenedManager(
            checkpoint,
            self.model_dir,
            calls.saving_listeners,
            max_to_keep=config.keep_checkpoint_max or None,
            keep_checkpoint_every_n_hours=config.keep_checkpoint_every_n_hours,
            checkpoint_interval=config.save_checkpoints_steps,
            init_fn=self._make_init_fn(checkpoint),
            may_differ="input",
        )

    def _make_init_fn(self, checkpoint: Checkpoint) -> Callable[[], Any] | None:
        """Returns a function that reads the checkpoint of a warm start, if any."""
        path = self.find_warm_start()
        if path is None:
            return None

        def read() -> None:
            checkpoint.read(path, only="model")
            logger.info("warm start from %s.", path)

        return read
