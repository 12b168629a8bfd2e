"""The estimator: `train`, `evaluate` and `predict` as calls of a `Controller`."""

import contextlib
import copy
import os
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from armillary._checks import check_instance, check_one_of
from armillary._logging import logger
from armillary._traceback import hides_frames
from armillary.checkpoint._checkpoint import Checkpoint
from armillary.checkpoint._folder import as_absolute, find_checkpoints
from armillary.checkpoint._manager import CheckpointManager
from armillary.cluster._join import get_peers
from armillary.controller._controller import Controller
from armillary.data._dataset import DistributedDataset
from armillary.data._layout import InputOptions
from armillary.distribute._strategy import Strategy
from armillary.distribute.replica._context import get_strategy
from armillary.errors import CapturedStateError, EstimatorError
from armillary.estimator._model_fn import ModeKeys, Model, ModelFn
from armillary.estimator._run_config import RunConfig, check_call, choose_directory
from armillary.estimator._runners import (
    EstimatorEvaluator,
    EstimatorTrainer,
    InputPosition,
    bind_input,
    find_specs,
    predict,
)
from armillary.typing import Output, PyTree

StrPath = str | os.PathLike[str]


class Estimator:
    """Trains and evaluates what a model function describes (`tf.estimator.Estimator`).

    See the package, `armillary.estimator`, for model functions and input functions.

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

    # What is added to errors.
    _notes: dict[type[Exception], str] = {  # noqa: RUF012
        CapturedStateError: "`model_fn` is part of the step: it makes its modules by "
        "`modules.make(name, make_fn)`, and uses no other."
    }

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
                f"`params` is {params!r}, but it must be copied: {error}. Put numbers, "
                "strings and what holds those in it, and make the rest in `model_fn`."
            ) from error
        self._model_fn = ModelFn(model_fn, self.params, config)
        self._model = Model(self._model_fn, config.tf_random_seed or 0)
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
        with self.make_controller(input_fn, resumes=resumes) as controller:
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
        with made.make_controller(None, **inputs) as controller:
            return made.describe(controller.evaluate(-1 if steps is None else steps))

    @hides_frames
    def predict(
        self,
        input_fn: Callable[..., Any],
        *,
        checkpoint_path: StrPath | None = None,
        yield_single_examples: bool = True,
    ) -> Iterator[Any]:
        """Returns an iterator over the predictions of the latest checkpoint.

        It runs without a strategy, as in TensorFlow. The function is called, and the
        checkpoint read, when the first prediction is asked for.

        Args:
            input_fn: The input function. Of batches that are pairs or other tuples, the
                first entry has the features.
            checkpoint_path: The folder of another checkpoint to take.
            yield_single_examples: Whether what is iterated over is examples, rather
                than batches, whose predictions may then have any shape.

        Returns:
            What `predictions` of the model function has for one example: a dictionary
            of NumPy arrays, as a rule.

        Raises:
            EstimatorError: If a function cannot work, or several processes have joined.
            TypeError: If `input_fn` cannot be called, or `checkpoint_path` is no path.
            ValueError: If `yield_single_examples` is neither True nor False.
        """
        check_call(input_fn)
        check_one_of("yield_single_examples", yield_single_examples, (True, False))
        if get_peers() is not None:
            raise EstimatorError(
                "`predict` was called where several processes train together, but it "
                "runs in one. Call it in a program of its own, on the same `model_dir`."
            )
        made = self._at(checkpoint_path)
        return predict(
            made._model,
            bind_input(input_fn, ModeKeys.PREDICT, self.params, self.config),
            lambda: made._path or made.latest_checkpoint(),
            yields_examples=yield_single_examples,
        )

    @property
    def global_step(self) -> int:
        """The step of the model in memory: 0 before the first call of a method."""
        if not self._model.is_built:
            return 0
        return int(np.asarray(self._model.optimizer.step.get_value()))

    def latest_checkpoint(self) -> str | None:
        """Returns the path of the latest checkpoint in `model_dir`, or `None`."""
        saved = find_checkpoints(as_absolute("model_dir", self.model_dir))
        return str(saved[-1].path) if saved else None

    def eval_dir(self, name: str | None = None) -> str:
        """Returns where summaries of evaluations of a name go; see `evaluate`."""
        check_instance("name", name, str | None, 'Write `name="test"`.')
        return os.path.join(self.model_dir, f"eval_{name}" if name else "eval")

    @contextlib.contextmanager
    def make_controller(
        self,
        train_input_fn: Callable[..., Any] | None,
        *,
        eval_input_fn: Callable[..., Any] | None = None,
        eval_name: str | None = None,
        resumes: bool = False,
    ) -> Iterator[Controller]:
        """Makes what runs the loops, once it has restored the latest checkpoint.

        `train`, `evaluate` and `train_and_evaluate` call methods of the controller; use
        it for what they lack, such as `request_stop`.

        Args:
            train_input_fn: The input function of training; `None` for no trainer.
            eval_input_fn: That of evaluations; `None` for no evaluator.
            eval_name: As in `evaluate`.
            resumes: Whether training goes on in the data where the checkpoint is.

        Yields:
            The controller.

        Raises:
            EstimatorError: If a function cannot work, or this process does not train.
            CapturedStateError: If `model_fn` uses a module from elsewhere.
            TypeError: If `eval_name` is no string.
        """
        eval_summary_dir = self.eval_dir(eval_name)
        config, position = self.config, InputPosition()
        trainer = evaluator = None
        if train_input_fn is not None:
            if not config.plan.is_training:
                raise EstimatorError(
                    f"`train` was called in the task {config.task_type} "
                    f"{config.task_id}, which does not train. Call "
                    "`armillary.estimator.train_and_evaluate` in all processes."
                )
            strategy = config.train_distribute or get_strategy()
            dataset, specs = self._distribute(train_input_fn, ModeKeys.TRAIN, strategy)
            self._model.build_training(*specs)
            position = InputPosition(dataset, resumes=resumes)
            trainer = EstimatorTrainer(dataset, strategy, self._model)
        if eval_input_fn is not None:
            strategy = self._eval_strategy
            dataset, specs = self._distribute(eval_input_fn, ModeKeys.EVAL, strategy)
            # The checkpoint holds what training needs.
            self._model.build_training(*specs)
            ops = self._model.build(*specs, ModeKeys.EVAL).eval_metric_ops
            evaluator = EstimatorEvaluator(dataset, strategy, self._model, ops)
        has_summaries = config.save_summary_steps is not None
        checkpoint = Checkpoint(
            model=self._model.store, optimizer=self._model.optimizer, input=position
        )
        manager = None
        if self._path is not None:
            checkpoint.read(self._path, only=("model", "optimizer/step"))
        else:
            manager = CheckpointManager(
                checkpoint,
                self.model_dir,
                max_to_keep=config.keep_checkpoint_max or None,
                keep_checkpoint_every_n_hours=config.keep_checkpoint_every_n_hours,
                checkpoint_interval=config.save_checkpoints_steps,
            )
        controller = Controller(
            trainer=trainer,
            evaluator=evaluator,
            global_step=self._model.optimizer.step,
            steps_per_loop=None if trainer is None else config.steps_per_loop,
            summary_interval=config.save_summary_steps if trainer else None,
            summary_dir=self.model_dir if trainer and has_summaries else None,
            eval_summary_dir=eval_summary_dir,
            checkpoint_manager=manager,
        )
        try:
            yield controller
        except tuple(self._notes) as error:
            error.add_note(self._notes[type(error)])
            raise
        finally:
            if manager is not None:
                manager.close()
            controller.summary_manager.close()
            controller.eval_summary_manager.close()

    def describe(self, output: Output) -> dict[str, Any]:
        """Returns the output of an evaluation as numbers, with the `global_step`."""
        values = {name: np.asarray(value) for name, value in (output or {}).items()}
        numbers = {n: each if each.ndim else each.item() for n, each in values.items()}
        return {**numbers, "global_step": self.global_step}

    @property
    def _eval_strategy(self) -> Strategy:
        training = self.config.train_distribute
        is_joint = training is not None and training.peers is not None
        found = self.config.eval_distribute or (training if is_joint else None)
        return found or get_strategy()

    def _distribute(
        self, input_fn: Callable[..., Any], mode: ModeKeys, strategy: Strategy
    ) -> tuple[DistributedDataset, tuple[PyTree, PyTree]]:
        """Returns the data of a strategy, and what features and labels look like."""
        check_call(input_fn)
        make_data = bind_input(input_fn, mode, self.params, self.config)
        # A step of training needs a batch for each replica; an evaluation counts every
        # example once in any case. Rows that some replicas lack cannot travel between
        # processes.
        remainder = "exact" if strategy.peers is None else "drop"
        is_training = mode is ModeKeys.TRAIN
        options = InputOptions(remainder=remainder if is_training else None)
        dataset = strategy.distribute_datasets_from_function(make_data, options)
        return dataset, find_specs(dataset)

    def _at(self, checkpoint_path: StrPath | None) -> "Estimator":
        """Returns this estimator, or one like it that is at a checkpoint."""
        if checkpoint_path is None:
            return self
        # What this one holds in memory stays what it is.
        made = copy.copy(self)
        made._path = str(as_absolute("checkpoint_path", checkpoint_path))
        made._model = Model(self._model_fn, self.config.tf_random_seed or 0)
        return made
