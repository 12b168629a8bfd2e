"""The estimator: `train`, `evaluate` and `predict` as calls of a `Controller`."""

import contextlib
import os
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from armillary._checks import check_instance, check_positive_int
from armillary._logging import ensure_visible, logger
from armillary._traceback import hides_frames
from armillary.checkpoint._checkpoint import Checkpoint
from armillary.checkpoint._folder import as_absolute, find_checkpoints
from armillary.checkpoint._manager import CheckpointManager
from armillary.cluster._join import get_peers
from armillary.controller._controller import Controller
from armillary.data._input_context import InputContext
from armillary.distribute._strategy import Strategy
from armillary.distribute.program._function import function
from armillary.distribute.replica._context import get_strategy
from armillary.distribute.strategies._single import DefaultStrategy
from armillary.errors import CapturedStateError, EstimatorError
from armillary.estimator._estimator_spec import ModeKeys
from armillary.estimator._input import (
    InputFn,
    InputPosition,
    distribute_input,
    find_batch_spec,
    find_specs,
)
from armillary.estimator._model_fn import Model, ModelFn, Modules, ModuleStore
from armillary.estimator._run_config import RunConfig
from armillary.estimator._runners import EstimatorEvaluator, EstimatorTrainer
from armillary.typing import Output, PyTree


class Estimator:
    """Trains and evaluates what a model function describes (`tf.estimator.Estimator`).

    See the package, `armillary.estimator`, for model functions and input functions.

    Args:
        model_fn: The model function.
        model_dir: Where checkpoints and summaries are. By default that of `config`, or
            else a new temporary directory. All processes of a job must see it.
        config: Strategies and intervals.
        params: What `model_fn` and input functions get as `params`.

    Attributes:
        config: As given, like `params`.
        model_dir: The directory.

    Raises:
        EstimatorError: If `model_fn` has other arguments than a model function, two
            directories are given, or processes would train alone.
        TypeError: If `config` is no `RunConfig`.
    """

    def __init__(
        self,
        model_fn: Callable[..., Any],
        model_dir: str | os.PathLike[str] | None = None,
        config: RunConfig | None = None,
        params: Any = None,
    ) -> None:
        self.config = config = RunConfig() if config is None else config
        fix = "Write `config=armillary.estimator.RunConfig(...)`."
        check_instance("config", config, RunConfig, fix)
        config.check_joined()
        self.params = params
        self._model_fn = ModelFn(model_fn, params, config)
        self._model = Model(self._model_fn, config.tf_random_seed or 0)
        self.model_dir = _choose_directory(model_dir, config)

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
        _check_steps(steps=steps, max_steps=max_steps)
        with self.make_controller(
            input_fn, resumes=max_steps is not None
        ) as controller:
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
        name: str | None = None,
    ) -> dict[str, Any]:
        """Evaluates the latest checkpoint, or an untrained model if there is none.

        Args:
            input_fn: The input function.
            steps: How many steps to evaluate, each of one batch for every replica.
                `None` evaluates all of the data, each example once.
            name: Summaries go to `eval_<name>` in `model_dir`, not to `eval`.

        Returns:
            `loss`, the mean over batches, the metrics of the model function, and
            `global_step`.

        Raises:
            ValueError: If `steps` is not positive.
            EstimatorError: If a function cannot work.
        """
        _check_steps(steps=steps)
        with self.make_controller(
            None, eval_input_fn=input_fn, eval_name=name
        ) as controller:
            return self.describe(controller.evaluate(-1 if steps is None else steps))

    @hides_frames
    def predict(self, input_fn: Callable[..., Any]) -> Iterator[Any]:
        """Yields the predictions of the latest checkpoint, one example at a time.

        It runs without a strategy, as in TensorFlow. The function is called, and the
        checkpoint read, when the first prediction is asked for.

        Args:
            input_fn: The input function. Of batches that are pairs or other tuples, the
                first entry has the features.

        Yields:
            What `predictions` of the model function has for one example: a dictionary
            of NumPy arrays, as a rule.

        Raises:
            EstimatorError: If a function cannot work, or several processes have joined.
        """
        if get_peers() is not None:
            raise EstimatorError(
                "`predict` was called where several processes train together, but it "
                "runs in one. Call it in a program of its own, on the same `model_dir`."
            )
        strategy = DefaultStrategy()
        make_data = InputFn(input_fn, ModeKeys.PREDICT, self.params, self.config)
        dataset = strategy.distribute_dataset(make_data(InputContext()))
        features = _features_of(find_batch_spec(dataset))
        self._model.build(features, None, ModeKeys.PREDICT)
        self._restore_modules()
        model_fn = self._model_fn

        @function(strategy=strategy)
        def predict_batch(store: ModuleStore, features: PyTree) -> PyTree:
            modules = Modules(store)
            return model_fn(modules, features, None, ModeKeys.PREDICT).predictions

        for batch in dataset:
            made = predict_batch(self._model.store, _features_of(batch))
            predictions = jax.device_get(made)
            leaves, treedef = jax.tree.flatten(predictions)
            _check_rows(leaves, batch)
            for row in zip(*leaves, strict=True):
                yield treedef.unflatten(row)

    @property
    def global_step(self) -> int:
        """The step of the model in memory: 0 before the first call of a method."""
        if not self._model.is_built:
            return 0
        return int(np.asarray(self._model.optimizer.step.get_value()))

    @property
    def latest_checkpoint(self) -> str | None:
        """The path of the latest checkpoint in `model_dir`, or `None`."""
        saved = find_checkpoints(as_absolute("model_dir", self.model_dir))
        return str(saved[-1].path) if saved else None

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

        A context manager, which ends the threads that write checkpoints. `train`,
        `evaluate` and `train_and_evaluate` call methods of the controller; use it for
        what they lack, such as `request_stop`.

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
        """
        config, position = self.config, InputPosition()
        trainer = evaluator = None
        if train_input_fn is not None:
            self._check_trains()
            strategy = config.train_distribute or get_strategy()
            make_data = self._bind(train_input_fn, ModeKeys.TRAIN)
            dataset = distribute_input(make_data, strategy, is_training=True)
            self._model.build_training(*find_specs(dataset))
            position = InputPosition(dataset, resumes=resumes)
            trainer = EstimatorTrainer(dataset, strategy, self._model)
        if eval_input_fn is not None:
            strategy = self._eval_strategy
            make_data = self._bind(eval_input_fn, ModeKeys.EVAL)
            dataset = distribute_input(make_data, strategy, is_training=False)
            specs = find_specs(dataset)
            # The checkpoint holds what training needs.
            self._model.build_training(*specs)
            spec = self._model.build(*specs, ModeKeys.EVAL)
            evaluator = EstimatorEvaluator(dataset, strategy, self._model, spec)
        eval_folder = "eval" if eval_name is None else f"eval_{eval_name}"
        has_summaries = config.save_summary_steps is not None
        manager = CheckpointManager(
            Checkpoint(
                model=self._model.store,
                optimizer=self._model.optimizer,
                input=position,
            ),
            self.model_dir,
            max_to_keep=config.keep_checkpoint_max or None,
            checkpoint_interval=config.save_checkpoints_steps,
        )
        controller = Controller(
            trainer=trainer,
            evaluator=evaluator,
            global_step=self._model.optimizer.step,
            steps_per_loop=None if trainer is None else config.steps_per_loop,
            summary_interval=config.save_summary_steps if trainer else None,
            summary_dir=self.model_dir if trainer and has_summaries else None,
            eval_summary_dir=os.path.join(self.model_dir, eval_folder),
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
            manager.close()
            controller.summary_manager.close()
            controller.eval_summary_manager.close()

    def describe(self, output: Output) -> dict[str, Any]:
        """Returns the output of an evaluation as numbers, with the `global_step`."""
        arrays = {name: np.asarray(value) for name, value in (output or {}).items()}
        values = {
            name: array.item() if array.ndim == 0 else array
            for name, array in arrays.items()
        }
        return {**values, "global_step": self.global_step}

    @property
    def _eval_strategy(self) -> Strategy:
        config = self.config
        if config.eval_distribute is not None:
            return config.eval_distribute
        training = config.train_distribute
        if training is not None and training.peers is not None:
            return training
        return get_strategy()

    def _bind(self, input_fn: Callable[..., Any], mode: ModeKeys) -> InputFn:
        return InputFn(input_fn, mode, self.params, self.config)

    def _check_trains(self) -> None:
        plan = self.config.plan
        if not plan.is_training:
            raise EstimatorError(
                f"`train` was called in the task {plan.task_type} {plan.task_id}, "
                "which does not train. Call `armillary.estimator.train_and_evaluate` "
                "in all processes: each does its part."
            )

    def _restore_modules(self) -> None:
        """Restores the latest checkpoint, and of it the modules alone."""
        ensure_visible()
        path = self.latest_checkpoint
        if path is None:
            logger.info(
                "found no checkpoint in %s; predicting as it is.", self.model_dir
            )
            return
        Checkpoint(model=self._model.store).read(path)


def _choose_directory(
    model_dir: str | os.PathLike[str] | None, config: RunConfig
) -> str:
    given, other = (
        None if path is None else os.path.abspath(os.fspath(path))
        for path in (model_dir, config.model_dir)
    )
    if given is not None and other is not None and given != other:
        raise EstimatorError(
            f"`model_dir` is {given!r}, but that of `config` is {other!r}. Give one of "
            "them."
        )
    if (directory := given or other) is not None:
        return directory
    if config.plan.is_distributed:
        raise EstimatorError(
            "`model_dir` is None, but all processes of a job need the same directory. "
            'Write `model_dir="runs/model"`.'
        )
    ensure_visible()
    directory = tempfile.mkdtemp()
    logger.warning("`model_dir` is None: checkpoints go to %s.", directory)
    return directory


def _check_steps(**numbers: int | None) -> None:
    for name, number in numbers.items():
        if number is not None:
            check_positive_int(name, number)


def _features_of(batch: Any) -> Any:
    return batch[0] if type(batch) in (tuple, list) else batch


def _check_rows(leaves: list[Any], batch: Any) -> None:
    num_rows = len(jax.tree.leaves(batch)[0])
    shapes = [np.shape(leaf) for leaf in leaves]
    if not leaves or any(shape[:1] != (num_rows,) for shape in shapes):
        raise EstimatorError(
            f"`predictions` of the `EstimatorSpec` have the shapes {shapes}, but the "
            f"batch has {num_rows} examples. Give arrays with an entry for each."
        )
