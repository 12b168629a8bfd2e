"""The estimator: `train`, `evaluate` and `predict` as calls of a `Controller`."""

import contextlib
import copy
import functools
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from armillary._checks import check_instance, check_one_of, check_path
from armillary._logging import logger
from armillary._traceback import hides_frames
from armillary.actions._export import ExportModel
from armillary.checkpoint._checkpoint import Checkpoint
from armillary.checkpoint._folder import as_absolute, find_checkpoints
from armillary.cluster._join import get_peers
from armillary.controller._controller import Controller
from armillary.errors import CapturedStateError, EstimatorError, NonFiniteError
from armillary.estimator._controllers import Calls, ControllerMaker
from armillary.estimator._hooks import ListenedManager, as_hooks
from armillary.estimator._model_fn import ModeKeys, Model, check_model_fn
from armillary.estimator._run_config import (
    Listener,
    RunConfig,
    check_call,
    choose_directory,
)
from armillary.estimator._runners import predict
from armillary.typing import Action, Output, PyTree

StrPath = str | os.PathLike[str]


class Estimator:
    """Trains and evaluates a model given as a function (`tf.estimator.Estimator`).

    See `docs/advanced/model_functions.md`.

    Args:
        model_fn: The model function.
        model_dir: Directory of checkpoints and summaries. By default, or if it is
            empty, the `model_dir` of `config`, or else a new temporary directory. All
            processes of a job must see it.
        config: Strategies and intervals.
        params: An object that is copied, and passed to `model_fn` and input functions
            as `params`. `model_dir`, `config` and `params` are attributes as well.
        warm_start_from: The folder of a checkpoint, or a directory of checkpoints. It
            is read as long as `model_dir` has no checkpoint. The modules begin with its
            values, and the optimizer begins again.

    Raises:
        EstimatorError: If `model_fn` does not have the arguments of a model function,
            or has no `params` although they are given; if two directories are given,
            or processes would train alone.
        TypeError: If `config` is not a `RunConfig`, `model_dir` or `warm_start_from` is
            not a path, or `model_fn` cannot be called.
    """

    _label_rule: str | None = None

    def __init__(
        self,
        model_fn: Callable[..., Any],
        model_dir: StrPath | None = None,
        config: RunConfig | None = None,
        params: Any = None,
        warm_start_from: StrPath | None = None,
    ) -> None:
        check_model_fn(model_fn, params)
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
        if warm_start_from is not None:
            check_path("warm_start_from", warm_start_from)
        self._warm_start_from = warm_start_from
        self._model = self._make_model(model_fn)
        # The checkpoint that `evaluate` and `predict` read in place of the latest one.
        self._path: str | None = None
        # The controller of the running call, and the reason if a hook stopped the call.
        self._controller: Controller | None = None
        self._stop_reason: str | None = None
        self.model_dir = choose_directory(model_dir, config)

    def _make_model(self, model_fn: Callable[..., Any]) -> Model:
        seed = self.config.tf_random_seed or 0
        return Model(model_fn, seed, params=self.params, config=self.config)

    @hides_frames
    def train(
        self,
        input_fn: Callable[..., Any],
        *,
        steps: int | None = None,
        max_steps: int | None = None,
        hooks: Action | Sequence[Action] | None = None,
        saving_listeners: Listener | Sequence[Listener] | None = None,
    ) -> "Estimator":
        """Trains from the latest checkpoint on, and saves one at the end.

        Args:
            input_fn: The input function. Every call begins with its first batch, as in
                TensorFlow, unless `max_steps` is given.
            steps: The number of steps to train. `None` trains until the data ends.
            max_steps: The global step to train up to. Training that was stopped
                continues at the data position of the checkpoint, if the data has
                positions. Nothing happens if this step is reached already.
            hooks: Functions that are called with the output of each loop, for example
                actions of `armillary.actions`. A hook ends training with
                `request_stop`.
            saving_listeners: Functions that are called with the path of each checkpoint
                when it is on disk.

        Returns:
            This estimator.

        Raises:
            ValueError: If both numbers are given, or one is not positive.
            EstimatorError: If a function is not valid, or this process does not train.
            NonFiniteError: If a loss or a weight is not a number any more.
        """
        if steps is not None and max_steps is not None:
            raise ValueError(
                f"`steps` is {steps} and `max_steps` is {max_steps}, but only one of "
                "them may be given. Use `steps` for the number of further steps, or "
                "`max_steps` for the step to train up to."
            )
        check_call(input_fn, steps=steps, max_steps=max_steps)
        calls = Calls(
            train_input_fn=input_fn,
            train_hooks=as_hooks("hooks", hooks),
            saving_listeners=as_hooks("saving_listeners", saving_listeners),
            resumes=max_steps is not None,
        )
        with self._make_controller(calls) as controller:
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
        hooks: Action | Sequence[Action] | None = None,
    ) -> dict[str, Any]:
        """Evaluates the latest checkpoint, or an untrained model if there is none.

        Args:
            input_fn: The input function.
            steps: The number of steps to evaluate, each of one batch for every replica.
                `None` evaluates all of the data, each example once.
            checkpoint_path: The folder of another checkpoint to evaluate.
            name: Summaries go to `eval_<name>` in `model_dir`, not to `eval`.
            hooks: Functions that are called with the output of the evaluation.

        Returns:
            `loss`, the mean over batches, the metrics of the model function, and
            `global_step`.

        Raises:
            ValueError: If `steps` is not positive.
            TypeError: If `name` is not a string, or `checkpoint_path` is not a path.
            EstimatorError: If a function is not valid.
        """
        check_call(input_fn, name, steps=steps)
        made = self._at(checkpoint_path)
        calls = Calls(
            eval_input_fn=input_fn,
            eval_name=name,
            eval_hooks=as_hooks("hooks", hooks),
        )
        with made._make_controller(calls) as controller:
            return made._describe(controller.evaluate(-1 if steps is None else steps))

    @hides_frames
    def predict(
        self,
        input_fn: Callable[..., Any],
        *,
        predict_keys: Sequence[str] | None = None,
        checkpoint_path: StrPath | None = None,
        yield_single_examples: bool = True,
    ) -> Iterator[Any]:
        """Returns an iterator over the predictions of the latest checkpoint.

        It runs without a strategy, as in TensorFlow. When the first prediction is
        requested, the function is called and the checkpoint is read.

        Args:
            input_fn: The input function. If batches are pairs or other tuples, the
                first entry has the features.
            predict_keys: The entries of the predictions to return; `None` for all.
            checkpoint_path: The folder of another checkpoint to take.
            yield_single_examples: True if each item is for one example. Otherwise each
                item is for one batch.

        Returns:
            The part of `predictions` of the model function for one example, usually a
            dictionary of NumPy arrays.

        Raises:
            EstimatorError: If a function is not valid, several processes have joined,
                or the predictions lack one of `predict_keys`.
            TypeError: If `input_fn` is not callable, `checkpoint_path` is not a path,
                or `predict_keys` is not a list of strings.
            ValueError: If `yield_single_examples` is neither true nor false.
        """
        _check_keys(predict_keys)
        check_one_of("yield_single_examples", yield_single_examples, (True, False))
        make_data = self._maker.bind(input_fn, ModeKeys.PREDICT)
        if not get_peers().is_alone:
            raise EstimatorError(
                "`predict` was called where several processes train together, but it "
                "runs in one process. Call it in a separate program, with the same "
                "`model_dir`."
            )
        made = self._at(checkpoint_path)
        return predict(
            made._model,
            make_data,
            made._find_checkpoint,
            predict_keys,
            bool(yield_single_examples),
        )

    @hides_frames
    def export_model(
        self,
        file_manager: Any,
        features: PyTree,
        *,
        checkpoint_path: StrPath | None = None,
        polymorphic_batch_size: bool = True,
        platforms: str | Sequence[str] | None = None,
    ) -> None:
        """Exports the computation of `predict`, as one file that needs only JAX.

        It replaces `export_saved_model`. In a hook or an exporter it exports the model
        in memory, and otherwise the latest checkpoint.

        Args:
            file_manager: Names the files: an `armillary.actions.ExportFileManager`.
            features: Features of one batch, as `input_fn` gives them: arrays or
                `jax.ShapeDtypeStruct`.
            checkpoint_path: The folder of another checkpoint to export.
            polymorphic_batch_size: True if the file takes batches of any size.
            platforms: As in `armillary.actions.ExportModel`.

        Raises:
            EstimatorError: If there is no checkpoint, or the model function is not
                valid.
            TypeError: If an argument is of another type.
            ValueError: As in `armillary.actions.ExportModel`.
        """
        made = self._at(checkpoint_path)
        model = made._model
        spec = jax.tree.map(_as_spec, features)
        model.build(spec, None, ModeKeys.PREDICT)
        if made._controller is None:
            path = made._path or made.latest_checkpoint()
            if path is None:
                raise EstimatorError(
                    f"`model_dir` is {self.model_dir!r}, which has no checkpoint to "
                    "export. Call `train` first."
                )
            Checkpoint(model=model.modules).read(path)

        def compute(modules: Any, features: Any) -> PyTree:
            return model.call(modules, features, None, ModeKeys.PREDICT).predictions

        export = ExportModel(
            functools.partial(compute, model.modules),
            file_manager,
            args=(spec,),
            polymorphic_batch_size=polymorphic_batch_size,
            platforms=platforms,
        )
        export()

    def request_stop(self, reason: str) -> None:
        """Ends the running call of `train`, after its current loop and a save.

        Hooks such as `armillary.actions.EarlyStopping(estimator, "loss", ...)` call it.

        Args:
            reason: The reason to stop, for the log.

        Raises:
            EstimatorError: If no call of `train` runs.
        """
        if self._controller is None:
            raise EstimatorError(
                f"`request_stop` was called for the reason {reason!r:.80}, but this "
                "estimator does not train. Call it from a hook of `train`."
            )
        self._controller.request_stop(reason)
        self._stop_reason = reason

    @property
    def global_step(self) -> int:
        """The step of the model in memory: 0 before the first call of a method."""
        optimizer = self._model.optimizer
        return 0 if optimizer is None else int(np.asarray(optimizer.step.get_value()))

    def latest_checkpoint(self) -> str | None:
        """Returns the path of the latest checkpoint in `model_dir`, or `None`."""
        saved = find_checkpoints(as_absolute("model_dir", self.model_dir))
        return str(saved[-1].path) if saved else None

    def _find_checkpoint(self) -> str | None:
        """Returns the path of the checkpoint whose modules are to be read."""
        return self._path or self.latest_checkpoint() or self._maker.find_warm_start()

    def eval_dir(self, name: str | None = None) -> str:
        """Returns the directory for summaries of evaluations with a name.

        Args:
            name: The `name` of `evaluate`.
        """
        check_instance("name", name, str | None, 'Write `name="test"`.')
        return os.path.join(self.model_dir, f"eval_{name}" if name else "eval")

    @contextlib.contextmanager
    def _make_controller(self, calls: Calls) -> Iterator[Controller]:
        """Makes the controller, and restores the latest checkpoint."""
        eval_summary_dir = self.eval_dir(calls.eval_name)
        controller, manager = self._maker.make(calls, eval_summary_dir)
        with self._running(controller, manager):
            yield controller

    @property
    def _maker(self) -> ControllerMaker:
        """The maker of controllers for the present model and settings."""
        return ControllerMaker(
            model=self._model,
            config=self.config,
            params=self.params,
            model_dir=self.model_dir,
            path=self._path,
            warm_start_from=self._warm_start_from,
        )

    @contextlib.contextmanager
    def _running(
        self, controller: Controller, manager: ListenedManager | None
    ) -> Iterator[None]:
        """Notes the controller that runs, and closes its files at the end."""
        self._controller = controller
        self._stop_reason = None
        try:
            with self._adding_notes():
                yield
        finally:
            self._controller = None
            if manager is not None:
                manager.close()
            controller.summary_manager.close()
            controller.eval_summary_manager.close()

    @contextlib.contextmanager
    def _adding_notes(self) -> Iterator[None]:
        """Adds the rules for model functions and labels to errors."""
        try:
            yield
        except CapturedStateError as error:
            error.add_note(
                "`model_fn` is part of the step: make its modules with "
                "`modules.make(name, make_fn)`, and use no other modules."
            )
            raise
        except NonFiniteError as error:
            if self._label_rule is not None:
                error.add_note(self._label_rule)
            raise

    def _describe(self, output: Output) -> dict[str, Any]:
        """Returns the output of an evaluation as numbers, with the `global_step`."""
        numbers: dict[str, Any] = {}
        for name, value in (output or {}).items():
            array = np.asarray(value)
            numbers[name] = array if array.ndim else array.item()
        return {**numbers, "global_step": self.global_step}

    def _at(self, checkpoint_path: StrPath | None) -> "Estimator":
        """Returns this estimator, or a copy of it that reads another checkpoint."""
        if checkpoint_path is None:
            return self
        # The copy has a model of its own, so that the model in memory does not change.
        made = copy.copy(self)
        made._model = self._make_model(self._model.fn)
        made._controller = None
        made._path = str(as_absolute("checkpoint_path", checkpoint_path))
        return made


def _check_keys(predict_keys: Any) -> None:
    if predict_keys is None:
        return
    is_list = isinstance(predict_keys, list | tuple)
    if not is_list or not all(isinstance(key, str) for key in predict_keys):
        raise TypeError(
            f"`predict_keys` is {predict_keys!r:.80}, but it must be a list of names "
            'of predictions. Write `predict_keys=["logits"]`.'
        )


def _as_spec(leaf: Any) -> jax.ShapeDtypeStruct:
    array = leaf if hasattr(leaf, "shape") else np.asarray(leaf)
    dtype = jax.dtypes.canonicalize_dtype(array.dtype)
    return jax.ShapeDtypeStruct(array.shape, dtype)
