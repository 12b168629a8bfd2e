"""The estimator: `train`, `evaluate` and `predict` as calls of a `Controller`."""

import contextlib
import copy
import functools
import os
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from armillary._checks import check_instance
from armillary._logging import logger
from armillary._traceback import hides_frames
from armillary.checkpoint._checkpoint import Checkpoint
from armillary.checkpoint._folder import as_absolute, find_checkpoints
from armillary.checkpoint._manager import CheckpointManager
from armillary.cluster._join import get_peers
from armillary.controller._controller import Controller
from armillary.data._layout import InputContext
from armillary.distribute.replica._context import get_strategy
from armillary.errors import CapturedStateError, EstimatorError
from armillary.estimator._model_fn import ModeKeys, Model
from armillary.estimator._run_config import (
    EvalSpec,
    RunConfig,
    TrainSpec,
    check_call,
    choose_directory,
)
from armillary.estimator._runners import (
    EstimatorEvaluator,
    EstimatorTrainer,
    InputPosition,
    distribute,
    make_input,
    predict,
)
from armillary.typing import Output

StrPath = str | os.PathLike[str]


class Estimator:
    """Trains and evaluates what a model function describes (`tf.estimator.Estimator`).

    See `docs/estimator.md` for model functions and input functions.

    Args:
        model_fn: The model function.
        model_dir: Where checkpoints and summaries are. By default, or if it is empty,
            that of `config`, or else a new temporary directory. All processes of a job
            must see it.
        config: Strategies and intervals.
        params: What `model_fn` and input functions get as `params`: a copy of it. The
            last three are attributes as well.

    Raises:
        EstimatorError: If `model_fn` has other arguments than a model function, two
            directories are given, or processes would train alone.
        TypeError: If `config` is no `RunConfig`, `model_dir` no path, or `model_fn`
            cannot be called.
    """

    def __init__(
        self,
        model_fn: Callable[..., Any],
        model_dir: StrPath | None = None,
        config: RunConfig | None = None,
        params: Any = None,
    ) -> None:
        self.config = config = RunConfig() if config is None else config
        fix = "Write `config=armillary.estimator.RunConfig(...)`."
        check_instance("config", config, RunConfig, fix)
        try:
            self.params = copy.deepcopy(params)
        except TypeError as error:
            raise EstimatorError(
                f"`params` is {params!r}, but it must be copied: {error}. Put numbers "
                "and strings in it, and make the rest in `model_fn`."
            ) from error
        seed = config.tf_random_seed or 0
        self._model = Model(model_fn, seed, params=self.params, config=config)
        # What `evaluate` and `predict` read in place of the latest checkpoint.
        self._path: str | None = None
        self.model_dir = choose_directory(model_dir, config)

    @hides_frames
    def train(
        self,
        input_fn: Callable[..., Any],
        *,
        steps: int | None = None,
        max_steps: int | None = None,
    ) -> "Estimator":
        """Trains from the latest checkpoint on, and saves one at the end.

        Args:
            input_fn: The input function. Every call begins with its first batch, as in
                TensorFlow, unless `max_steps` is given.
            steps: How many steps to train. `None` trains until the data ends.
            max_steps: The global step to train up to. Training that was stopped then
                goes on in the data where the checkpoint is, if the data has positions.
                Nothing happens if this step is reached already.

        Returns:
            This estimator.

        Raises:
            ValueError: If both numbers are given, or one is not positive.
            EstimatorError: If a function cannot work, or this process does not train.
        """
        if steps is not None and max_steps is not None:
            raise ValueError(
                f"`steps` is {steps} and `max_steps` is {max_steps}, but only one of "
                "them may be given. Use `steps` for so many steps more, and "
                "`max_steps` for the step to train up to."
            )
        check_call(input_fn, steps=steps, max_steps=max_steps)
        resumes = max_steps is not None
        with self._make_controller(input_fn, resumes=resumes) as controller:
            start = self.global_step
            if max_steps is not None and start >= max_steps:
                logger.info("train | step %d: `max_steps` is reached already.", start)
                return self
            target = -1 if steps is None else start + steps
            controller.train(target if max_steps is None else max_steps)
        return self

    @hides_frames
    def evaluate(
        self,
        input_fn: Callable[..., Any],
        *,
        steps: int | None = None,
        checkpoint_path: StrPath | None = None,
        name: str | None = None,
    ) -> dict[str, Any]:
        """Evaluates the latest checkpoint, or an untrained model if there is none.

        Args:
            input_fn: The input function.
            steps: How many steps to evaluate, each of one batch for every replica.
                `None` evaluates all of the data, each example once.
            checkpoint_path: The folder of another checkpoint to evaluate.
            name: Summaries go to `eval_<name>` in `model_dir`, not to `eval`.

        Returns:
            `loss`, the mean over batches, the metrics of the model function, and
            `global_step`.

        Raises:
            ValueError: If `steps` is not positive.
            TypeError: If `name` is no string, or `checkpoint_path` no path.
            EstimatorError: If a function cannot work.
        """
        check_call(input_fn, name, steps=steps)
        made = self._at(checkpoint_path)
        inputs = {"eval_input_fn": input_fn, "eval_name": name}
        with made._make_controller(None, **inputs) as controller:
            return made._describe(controller.evaluate(-1 if steps is None else steps))

    @hides_frames
    def predict(
        self,
        input_fn: Callable[..., Any],
        *,
        checkpoint_path: StrPath | None = None,
    ) -> Iterator[Any]:
        """Returns an iterator over the predictions of the latest checkpoint.

        It runs without a strategy, as in TensorFlow. The function is called, and the
        checkpoint read, when the first prediction is asked for.

        Args:
            input_fn: The input function. Of batches that are pairs or other tuples, the
                first entry has the features.
            checkpoint_path: The folder of another checkpoint to take.

        Returns:
            What `predictions` of the model function has for one example: a dictionary
            of NumPy arrays, as a rule.

        Raises:
            EstimatorError: If a function cannot work, or several processes have joined.
            TypeError: If `input_fn` cannot be called, or `checkpoint_path` is no path.
        """
        make_data = self._bind(input_fn, ModeKeys.PREDICT)
        if get_peers() is not None:
            raise EstimatorError(
                "`predict` was called where several processes train together, but it "
                "runs in one. Call it in a program of its own, on the same `model_dir`."
            )
        made = self._at(checkpoint_path)
        return predict(
            made._model,
            make_data,
            lambda: made._path or made.latest_checkpoint(),
        )

    @property
    def global_step(self) -> int:
        """The step of the model in memory: 0 before the first call of a method."""
        optimizer = self._model.optimizer
        return 0 if optimizer is None else int(np.asarray(optimizer.step.get_value()))

    def latest_checkpoint(self) -> str | None:
        """Returns the path of the latest checkpoint in `model_dir`, or `None`."""
        saved = find_checkpoints(as_absolute("model_dir", self.model_dir))
        return str(saved[-1].path) if saved else None

    def eval_dir(self, name: str | None = None) -> str:
        """Returns where summaries of evaluations of a name go; see `evaluate`."""
        check_instance("name", name, str | None, 'Write `name="test"`.')
        return os.path.join(self.model_dir, f"eval_{name}" if name else "eval")

    @contextlib.contextmanager
    def _make_controller(
        self,
        train_input_fn: Callable[..., Any] | None,
        *,
        eval_input_fn: Callable[..., Any] | None = None,
        eval_name: str | None = None,
        resumes: bool = False,
    ) -> Iterator[Controller]:
        """Makes what runs the loops, once it has restored the latest checkpoint."""
        eval_summary_dir = self.eval_dir(eval_name)
        config, position = self.config, InputPosition()
        trainer = evaluator = manager = None
        if train_input_fn is not None:
            if not config.plan.is_training:
                raise EstimatorError(
                    f"`train` was called in the task {config.task_type} "
                    f"{config.task_id}, which does not train. Call "
                    "`armillary.estimator.train_and_evaluate` in all processes."
                )
            strategy = config.train_distribute or get_strategy()
            make_data = self._bind(train_input_fn, ModeKeys.TRAIN)
            dataset, specs = distribute(make_data, strategy, is_training=True)
            self._model.build_training(*specs)
            position = InputPosition(dataset, resumes=resumes)
            trainer = EstimatorTrainer(dataset, strategy, self._model)
        if eval_input_fn is not None:
            strategy, joint = config.eval_distribute, config.train_distribute
            if strategy is None and joint is not None and joint.peers is not None:
                strategy = joint
            strategy = strategy or get_strategy()
            make_data = self._bind(eval_input_fn, ModeKeys.EVAL)
            dataset, specs = distribute(make_data, strategy, is_training=False)
            # The checkpoint holds what training needs.
            self._model.build_training(*specs)
            ops = self._model.build(*specs, ModeKeys.EVAL).eval_metric_ops
            evaluator = EstimatorEvaluator(dataset, strategy, self._model, ops)
        optimizer = self._model.optimizer
        assert optimizer is not None  # One of the two has built it.
        checkpoint = Checkpoint(
            model=self._model.modules, optimizer=optimizer, input=position
        )
        if self._path is not None:
            checkpoint.read(self._path, only=("model", "optimizer/step"))
        else:
            manager = CheckpointManager(
                checkpoint,
                self.model_dir,
                max_to_keep=config.keep_checkpoint_max or None,
                keep_checkpoint_every_n_hours=config.keep_checkpoint_every_n_hours,
                checkpoint_interval=config.save_checkpoints_steps,
                may_differ="input",
            )
        summary_interval = config.save_summary_steps if trainer else None
        controller = Controller(
            trainer=trainer,
            evaluator=evaluator,
            global_step=optimizer.step,
            steps_per_loop=config.steps_per_loop if trainer else None,
            summary_interval=summary_interval,
            summary_dir=None if summary_interval is None else self.model_dir,
            eval_summary_dir=eval_summary_dir,
            checkpoint_manager=manager,
        )
        try:
            yield controller
        except CapturedStateError as error:
            error.add_note(
                "`model_fn` is part of the step: it makes its modules by "
                "`modules.make(name, make_fn)`, and uses no other."
            )
            raise
        finally:
            if manager is not None:
                manager.close()
            controller.summary_manager.close()
            controller.eval_summary_manager.close()

    def _describe(self, output: Output) -> dict[str, Any]:
        """Returns the output of an evaluation as numbers, with the `global_step`."""
        values = {name: np.asarray(value) for name, value in (output or {}).items()}
        numbers = {n: each if each.ndim else each.item() for n, each in values.items()}
        return {**numbers, "global_step": self.global_step}

    def _bind(
        self, input_fn: Callable[..., Any], mode: ModeKeys
    ) -> Callable[[InputContext], Any]:
        check_call(input_fn)
        values = {"mode": mode, "params": self.params, "config": self.config}
        return functools.partial(make_input, input_fn, values)

    def _at(self, checkpoint_path: StrPath | None) -> "Estimator":
        """Returns this estimator, or one like it that is at a checkpoint."""
        if checkpoint_path is None:
            return self
        # What this one holds in memory stays what it is.
        made = Estimator(self._model.fn, self.model_dir, self.config, self.params)
        made._path = str(as_absolute("checkpoint_path", checkpoint_path))
        return made


@hides_frames
def train_and_evaluate(
    estimator: Estimator, train_spec: TrainSpec, eval_spec: EvalSpec
) -> tuple[dict[str, Any] | None, list[Any]]:
    """Trains up to a step, evaluating whenever a checkpoint is due, and at the end.

    In one process the two take turns. In a cluster (`TF_CONFIG`), processes that train
    together train alone, as in TensorFlow: a process whose task is `evaluator`
    evaluates each checkpoint that appears in `model_dir`, until training has ended.
    Without one, call `Estimator.evaluate` in all processes when they have trained.

    Args:
        estimator: What to train.
        train_spec: How to train.
        eval_spec: How to evaluate.

    Returns:
        What the last evaluation of this process returned, `None` if there was none, and
        an empty list: TensorFlow's second value is what exporters returned.

    Raises:
        TypeError: If an argument is of another type.
        EstimatorError: As in `Estimator.train`.
    """
    for name, value, kind in (
        ("estimator", estimator, Estimator),
        ("train_spec", train_spec, TrainSpec),
        ("eval_spec", eval_spec, EvalSpec),
    ):
        fix = f"Make one, `armillary.estimator.{kind.__name__}(...)`."
        check_instance(name, value, kind, fix)
    config, max_steps = estimator.config, train_spec.max_steps
    eval_steps = -1 if eval_spec.steps is None else eval_spec.steps
    evaluates = {"eval_input_fn": eval_spec.input_fn, "eval_name": eval_spec.name}
    if config.plan.task_type == "evaluator":
        with estimator._make_controller(None, **evaluates) as controller:
            output = controller.evaluate_continuously(eval_steps, until_step=max_steps)
        return (None if output is None else estimator._describe(output)), []
    if config.plan.is_distributed:
        estimator.train(train_spec.input_fn, max_steps=max_steps)
        return None, []
    resumes = max_steps is not None
    with estimator._make_controller(
        train_spec.input_fn, resumes=resumes, **evaluates
    ) as controller:
        # At a step that was reached already, what is left is to evaluate.
        target = -1 if max_steps is None else max(max_steps, estimator.global_step)
        output = controller.train_and_evaluate(
            target, eval_steps, eval_interval=config.save_checkpoints_steps
        )
    return estimator._describe(output), []
