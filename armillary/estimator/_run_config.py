"""How estimators run: strategies, intervals, and which process this is."""

import dataclasses
import functools
import math
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from armillary._checks import (
    check_callable,
    check_instance,
    check_not_negative,
    check_not_negative_int,
    check_path,
    check_positive_int,
)
from armillary._logging import ensure_visible, logger
from armillary.checkpoint._folder import as_absolute
from armillary.cluster.resolvers._resolver import (
    ClusterResolver,
    SimpleClusterResolver,
    TFConfigClusterResolver,
)
from armillary.cluster.resolvers._spec import ClusterSpec, ProcessPlan
from armillary.distribute._strategy import Strategy
from armillary.errors import EstimatorError


@dataclass(frozen=True)
class RunConfig:
    """How an `Estimator` runs.

    Training runs in loops of as many steps as divide all three intervals, so choose
    ones that have much in common: with 100, 100 and 1000, a loop is 100 steps.

    Args:
        model_dir: Where checkpoints and summaries go, unless the estimator says.
        tf_random_seed: What the random numbers of modules begin with.
        save_summary_steps: Steps between summaries of training; `None` for none.
        save_checkpoints_steps: Steps between checkpoints; `None` saves at the end of
            each call of `train` alone. (TensorFlow saves every 600 seconds by default.)
        keep_checkpoint_max: How many checkpoints stay; `None` or 0 keeps all.
        keep_checkpoint_every_n_hours: As in `CheckpointManager`: hours between further
            ones that stay for good; `None` for no such ones.
        log_step_count_steps: Steps between log lines, which show the mean loss.
        train_distribute: The strategy of `train`; `None` for the one in effect.
        eval_distribute: The strategy of `evaluate`; `None` for the one in effect, and
            for that of training where several processes train.

    Raises:
        TypeError: If a strategy is none, or `model_dir` no path.
        ValueError: If a number is out of range, or `model_dir` is empty.
    """

    model_dir: str | os.PathLike[str] | None = None
    tf_random_seed: int | None = None
    save_summary_steps: int | None = 100
    save_checkpoints_steps: int | None = 1000
    keep_checkpoint_max: int | None = 5
    log_step_count_steps: int = 100
    train_distribute: Strategy | None = None
    eval_distribute: Strategy | None = None
    keep_checkpoint_every_n_hours: float | None = None

    def __post_init__(self) -> None:
        for name, check in _CHECKS.items():
            value = getattr(self, name)
            if value is not None or name == "log_step_count_steps":
                check(name, value)

    def replace(self, **changes: Any) -> "RunConfig":
        """Returns a copy with other values of some arguments."""
        return dataclasses.replace(self, **changes)

    @property
    def steps_per_loop(self) -> int:
        """Steps after which training may stop, log and save."""
        intervals = (
            self.log_step_count_steps,
            self.save_summary_steps,
            self.save_checkpoints_steps,
        )
        return math.gcd(*(steps for steps in intervals if steps is not None))

    @functools.cached_property
    def _resolver(self) -> ClusterResolver:
        strategy = self.train_distribute
        if strategy is not None and strategy.cluster_resolver is not None:
            return strategy.cluster_resolver
        if TFConfigClusterResolver.is_present(os.environ):
            return TFConfigClusterResolver()
        return SimpleClusterResolver(ClusterSpec({}))

    @property
    def plan(self) -> ProcessPlan:
        """Which process this is, from the strategy or from `TF_CONFIG`."""
        return self._resolver.process_plan()

    @property
    def cluster_spec(self) -> ClusterSpec:
        """The tasks of the job; none if this process is on its own."""
        return self._resolver.cluster_spec()

    @property
    def task_type(self) -> str:
        """The job of this process, `"worker"` if it is on its own."""
        return self.plan.task_type

    @property
    def task_id(self) -> int:
        """The index of this process in its job."""
        return self.plan.task_id

    @property
    def is_chief(self) -> bool:
        """Whether this is the process that writes checkpoints."""
        return bool(self.plan.is_chief)

    @property
    def num_worker_replicas(self) -> int | None:
        """How many processes train together, as far as is known."""
        return self.plan.num_processes


def _check_strategy(name: str, value: Any) -> None:
    fix = f"Write `{name}=armillary.MirroredStrategy()`."
    check_instance(name, value, Strategy, fix)


_CHECKS: dict[str, Callable[[str, Any], object]] = {
    "model_dir": check_path,
    "log_step_count_steps": check_positive_int,
    "save_summary_steps": check_positive_int,
    "save_checkpoints_steps": check_positive_int,
    "keep_checkpoint_max": check_not_negative_int,
    "tf_random_seed": check_not_negative_int,
    "keep_checkpoint_every_n_hours": check_not_negative,
    "train_distribute": _check_strategy,
    "eval_distribute": _check_strategy,
}


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


def check_call(input_fn: Any, name: Any = None, **numbers: int | None) -> None:
    """Raises if an input function, the name of an evaluation or a number is wrong."""
    check_callable("input_fn", input_fn)
    check_instance("name", name, str | None, 'Write `name="test"`.')
    for which, number in numbers.items():
        if number is not None:
            check_positive_int(which, number)


def choose_directory(
    model_dir: str | os.PathLike[str] | None, config: RunConfig
) -> str:
    """Returns the directory of an estimator, in which no other process trains alone."""
    strategy, plan = config.train_distribute, config.plan
    joins = strategy is not None and strategy.peers is not None
    if plan.is_training and plan.is_distributed and not joins:
        raise EstimatorError(
            f"`train_distribute` is {strategy!r}, but the cluster has "
            f"{plan.num_processes} processes that train, and each would train "
            "alone into one directory. Use `RunConfig(train_distribute="
            "armillary.MultiWorkerMirroredStrategy(), ...)`."
        )
    given, other = (
        None if path is None or str(path) == "" else str(as_absolute("model_dir", path))
        for path in (model_dir, config.model_dir)
    )
    if given is not None and other is not None and given != other:
        raise EstimatorError(
            f"`model_dir` is {given!r}, but that of `config` is {other!r}. Give one of "
            "them."
        )
    directory = given or other
    if directory is None and plan.is_distributed:
        raise EstimatorError(
            f"`model_dir` is {model_dir!r}, but all processes of a job need the same "
            'directory. Write `model_dir="runs/model"`.'
        )
    if directory is None:
        ensure_visible()
        directory = tempfile.mkdtemp()
        logger.warning("`model_dir` is %r: checkpoints go to %s.", model_dir, directory)
    return directory
