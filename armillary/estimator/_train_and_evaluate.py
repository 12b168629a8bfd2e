"""Training and evaluation in turns, in one process or in a cluster."""

import dataclasses
from typing import Any

from armillary._checks import check_instance
from armillary._traceback import hides_frames
from armillary.controller._controller import Controller
from armillary.estimator._controllers import Calls
from armillary.estimator._estimator import Estimator
from armillary.estimator._hooks import Exports, as_hooks
from armillary.estimator._run_config import EvalSpec, TrainSpec
from armillary.typing import Output


@hides_frames
def train_and_evaluate(
    estimator: Estimator, train_spec: TrainSpec, eval_spec: EvalSpec
) -> tuple[dict[str, Any] | None, list[Any]]:
    """Trains up to a step; evaluates whenever a checkpoint is due, and at the end.

    In one process the two take turns: an evaluation follows each checkpoint, after a
    number of steps or of seconds (`save_checkpoints_secs`). In a cluster (`TF_CONFIG`),
    processes that train together do not evaluate, as in TensorFlow. A process whose
    task is `evaluator` evaluates each checkpoint that appears in `model_dir`, until
    training has ended. Without such a process, call `Estimator.evaluate` in all
    processes after training.

    Args:
        estimator: The estimator to train.
        train_spec: The settings of training.
        eval_spec: The settings of evaluations.

    Returns:
        The result of the last evaluation of this process, `None` if there was none, and
        a list of the results of the exporters after it.

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

    config = estimator.config
    max_steps = train_spec.max_steps
    eval_steps = -1 if eval_spec.steps is None else eval_spec.steps
    exports = Exports(as_hooks("exporters", eval_spec.exporters))
    evaluates = Calls(
        eval_input_fn=eval_spec.input_fn,
        eval_name=eval_spec.name,
        eval_hooks=as_hooks("hooks", eval_spec.hooks),
        after_evaluation=(exports,),
    )

    if config.plan.task_type == "evaluator":
        with estimator._make_controller(evaluates) as controller:
            output = controller.evaluate_continuously(eval_steps, until_step=max_steps)
        described = None if output is None else estimator._describe(output)
        return described, exports.results

    if config.plan.is_distributed:
        estimator.train(
            train_spec.input_fn,
            max_steps=max_steps,
            hooks=train_spec.hooks,
            saving_listeners=train_spec.saving_listeners,
        )
        return None, []

    turns = _Turns(estimator)
    calls = dataclasses.replace(
        evaluates,
        train_input_fn=train_spec.input_fn,
        train_hooks=as_hooks("hooks", train_spec.hooks),
        saving_listeners=as_hooks("saving_listeners", train_spec.saving_listeners),
        resumes=max_steps is not None,
        when_save_is_due=turns.interrupt,
    )
    with estimator._make_controller(calls) as controller:
        # If the step was reached already, only an evaluation is left.
        target = -1 if max_steps is None else max(max_steps, estimator.global_step)
        if config.save_checkpoints_secs is None:
            output = controller.train_and_evaluate(
                target, eval_steps, eval_interval=config.save_checkpoints_steps
            )
        else:
            output = turns.take(controller, target, eval_steps)
    return estimator._describe(output), exports.results


class _Turns:
    """Training and evaluation in turns, if the interval is given in seconds."""

    def __init__(self, estimator: Estimator) -> None:
        self._estimator = estimator
        self._is_interrupted = False

    def interrupt(self) -> None:
        """Ends the running training, which then saves a checkpoint, to evaluate."""
        controller = self._estimator._controller
        assert controller is not None  # The controller calls this method.
        self._is_interrupted = True
        controller.request_stop("a checkpoint is due, and its evaluation")

    def take(self, controller: Controller, target: int, eval_steps: int) -> Output:
        """Trains up to a step; returns the last output of the evaluations."""
        while True:
            self._is_interrupted = False
            controller.train(target)
            output = controller.evaluate(eval_steps)

            is_reached = self._estimator.global_step == target
            # A hook of training or of the evaluation may have stopped it.
            is_stopped = self._estimator._stop_reason is not None
            # Otherwise the data may have ended.
            continues = self._is_interrupted and not is_stopped
            if is_reached or not continues:
                return output
