"""Training and evaluation in turns, in one process or in the tasks of a cluster."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from armillary._checks import check_instance
from armillary._traceback import hides_frames
from armillary.estimator._estimator import Estimator
from armillary.estimator._run_config import check_call


@dataclass(frozen=True)
class TrainSpec:
    """How `train_and_evaluate` trains.

    Args:
        input_fn: The input function.
        max_steps: The global step to train up to; `None` trains until the data ends.

    Raises:
        TypeError: If `input_fn` cannot be called.
        ValueError: If `max_steps` is not positive.
    """

    input_fn: Callable[..., Any]
    max_steps: int | None = None

    def __post_init__(self) -> None:
        check_call(self.input_fn, max_steps=self.max_steps)


@dataclass(frozen=True)
class EvalSpec:
    """How `train_and_evaluate` evaluates.

    Args:
        input_fn: The input function.
        steps: Steps of each evaluation; `None` evaluates all of the data.
        name: As in `Estimator.evaluate`.

    Raises:
        TypeError: If `input_fn` cannot be called, or `name` is no string.
        ValueError: If `steps` is not positive.
    """

    input_fn: Callable[..., Any]
    steps: int | None = 100
    name: str | None = None

    def __post_init__(self) -> None:
        check_call(self.input_fn, self.name, steps=self.steps)


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
        with estimator.make_controller(None, **evaluates) as controller:
            output = controller.evaluate_continuously(eval_steps, until_step=max_steps)
        return (None if output is None else estimator.describe(output)), []
    if config.plan.is_distributed:
        estimator.train(train_spec.input_fn, max_steps=max_steps)
        return None, []
    resumes = max_steps is not None
    with estimator.make_controller(
        train_spec.input_fn, resumes=resumes, **evaluates
    ) as controller:
        # At a step that was reached already, what is left is to evaluate.
        target = -1 if max_steps is None else max(max_steps, estimator.global_step)
        output = controller.train_and_evaluate(
            target, eval_steps, eval_interval=config.save_checkpoints_steps
        )
    return estimator.describe(output), []
