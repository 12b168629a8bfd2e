"""The settings of estimators: strategies, intervals, and the task of this process."""

import dataclasses
import functools
import json
import math
import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from armillary._checks import (
    check_instance,
    check_not_negative,
    check_not_negative_int,
    check_path,
    check_positive_int,
    check_seconds,
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
from armillary.estimator._hooks import as_hooks
from armillary.estimator._model_fn import check_input_fn
from armillary.parameter_server._strategy import ParameterServerStrategy
from armillary.typing import Action, Output

Listener: TypeAlias = Callable[[str], Any]
"""A function of the path of a checkpoint."""
_GLOBAL_ORDER = ("chief", "worker", "ps")
"""The jobs whose tasks are numbered together, in the order of their numbers."""


class _Default(int):
    """A default, to tell it from the same number given by the user."""


_EVERY_1000_STEPS = _Default(1000)


@dataclass(frozen=True)
class RunConfig:
    """The settings with which an `Estimator` runs.

    The greatest common divisor of the three intervals in steps is the length of a
    training loop. Choose intervals with a large one: 100, 100 and 1000 make loops of
    100 steps.

    Args:
        model_dir: The directory of checkpoints and summaries, if the estimator has
            none of its own.
        tf_random_seed: The seed of the modules' random numbers.
        save_summary_steps: Steps between summaries of training; `None` for none.
        save_checkpoints_steps: Steps between checkpoints; `None` saves only at the end
            of each call of `train`. (TensorFlow saves every 600 seconds by default.)
        save_checkpoints_secs: Seconds between checkpoints, in place of steps. The first
            loop that ends after this time is followed by a save.
        keep_checkpoint_max: How many checkpoints stay; `None` or 0 keeps all.
        keep_checkpoint_every_n_hours: Hours between checkpoints that are never
            removed, as in `CheckpointManager`; `None` keeps no such checkpoints.
        log_step_count_steps: Steps between log lines, which show the mean loss.
        train_distribute: The strategy of `train`; `None` for the one in effect.
        eval_distribute: The strategy of `evaluate`; `None` for the one in effect, or
            for the strategy of training if several processes train.

    Raises:
        TypeError: If `train_distribute` or `eval_distribute` is not a strategy, or
            `model_dir` is not a path.
        ValueError: If a number is out of range, `model_dir` is empty, or checkpoints
            are to be saved after both steps and seconds.
    """

    model_dir: str | os.PathLike[str] | None = None
    tf_random_seed: int | None = None
    save_summary_steps: int | None = 100
    save_checkpoints_steps: int | None = _EVERY_1000_STEPS
    keep_checkpoint_max: int | None = 5
    log_step_count_steps: int = 100
    train_distribute: Strategy | None = None
    eval_distribute: Strategy | None = None
    keep_checkpoint_every_n_hours: float | None = None
    save_checkpoints_secs: float | None = None

    def __post_init__(self) -> None:
        for name, check in _CHECKS.items():
            value = getattr(self, name)
            if value is not None or name == "log_step_count_steps":
                check(name, value)
        self._choose_interval()

    def _choose_interval(self) -> None:
        """Clears the default interval in steps if one in seconds is given."""
        steps = self.save_checkpoints_steps
        seconds = self.save_checkpoints_secs
        if seconds is None:
            return
        if isinstance(steps, _Default):
            object.__setattr__(self, "save_checkpoints_steps", None)
        elif steps is not None:
            raise ValueError(
                f"`save_checkpoints_steps` is {steps} and `save_checkpoints_secs` is "
                f"{seconds}, but only one of them can say when to save. Leave out one."
            )

    def replace(self, **changes: Any) -> "RunConfig":
        """Returns a copy with other values of some arguments.

        A new `save_checkpoints_steps` removes `save_checkpoints_secs`, and the other
        way round.
        """
        pair = {"save_checkpoints_steps", "save_checkpoints_secs"}
        given = pair & changes.keys()
        if len(given) == 1 and changes[next(iter(given))] is not None:
            changes |= dict.fromkeys(pair - given)
        return dataclasses.replace(self, **changes)

    @property
    def steps_per_loop(self) -> int:
        """The length of a loop; training may stop, log and save after each one."""
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
        """The task of this process, from the strategy or from `TF_CONFIG`."""
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
        """True in the process that writes checkpoints."""
        return bool(self.plan.is_chief)

    @property
    def num_worker_replicas(self) -> int | None:
        """The number of processes that train together; `None` if JAX finds it out."""
        strategy = self.train_distribute
        is_local = strategy is None or strategy.cluster_resolver is None
        if isinstance(strategy, ParameterServerStrategy) and is_local:
            return strategy.num_workers
        return self.plan.num_processes

    @property
    def num_ps_replicas(self) -> int:
        """The number of parameter servers."""
        strategy = self.train_distribute
        if isinstance(strategy, ParameterServerStrategy):
            return strategy.num_ps
        return len(self.cluster_spec.as_dict().get("ps", ()))

    @property
    def global_id_in_cluster(self) -> int | None:
        """The number of this task among chief, workers and parameter servers.

        It is `None` in an evaluator, which is not part of the cluster.
        """
        tasks = self.cluster_spec.as_dict()
        if self.task_type not in _GLOBAL_ORDER:
            return None
        before = _GLOBAL_ORDER[: _GLOBAL_ORDER.index(self.task_type)]
        return self.task_id + sum(len(tasks.get(job, ())) for job in before)

    @property
    def master(self) -> str:
        """The address of this task in the cluster; empty if it is on its own."""
        tasks = self.cluster_spec.as_dict().get(self.task_type, ())
        return tasks[self.task_id] if self.task_id < len(tasks) else ""

    @property
    def evaluation_master(self) -> str:
        """Always empty: a process evaluates on its own devices."""
        return ""

    @property
    def service(self) -> dict[str, Any] | None:
        """The entry `"service"` of `TF_CONFIG`, for the program's own use."""
        if not TFConfigClusterResolver.is_present(os.environ):
            return None
        return json.loads(os.environ["TF_CONFIG"]).get("service")


def _check_strategy(name: str, value: Any) -> None:
    fix = f"Write `{name}=armillary.MirroredStrategy()`."
    check_instance(name, value, Strategy, fix)


def _check_save_seconds(name: str, value: Any) -> None:
    check_seconds(name, value, f"Use `{name}=600`.")


_CHECKS: dict[str, Callable[[str, Any], object]] = {
    "model_dir": check_path,
    "log_step_count_steps": check_positive_int,
    "save_summary_steps": check_positive_int,
    "save_checkpoints_steps": check_positive_int,
    "keep_checkpoint_max": check_not_negative_int,
    "tf_random_seed": check_not_negative_int,
    "save_checkpoints_secs": _check_save_seconds,
    "keep_checkpoint_every_n_hours": check_not_negative,
    "train_distribute": _check_strategy,
    "eval_distribute": _check_strategy,
}


@dataclass(frozen=True)
class TrainSpec:
    """The settings with which `train_and_evaluate` trains.

    Args:
        input_fn: The input function.
        max_steps: The global step to train up to; `None` trains until the data ends.
        hooks: As in `Estimator.train`.
        saving_listeners: As in `Estimator.train`.

    Raises:
        TypeError: If `input_fn` cannot be called.
        ValueError: If `max_steps` is not positive.
        EstimatorError: If a hook or a listener is not a function.
    """

    input_fn: Callable[..., Any]
    max_steps: int | None = None
    hooks: Action | Sequence[Action] | None = None
    saving_listeners: Listener | Sequence[Listener] | None = None

    def __post_init__(self) -> None:
        check_call(self.input_fn, max_steps=self.max_steps)
        as_hooks("hooks", self.hooks)
        as_hooks("saving_listeners", self.saving_listeners)


@dataclass(frozen=True)
class EvalSpec:
    """The settings with which `train_and_evaluate` evaluates.

    Args:
        input_fn: The input function.
        steps: Steps of each evaluation; `None` evaluates all of the data.
        name: As in `Estimator.evaluate`.
        hooks: As in `Estimator.evaluate`.
        exporters: Functions of the output of an evaluation, which follow each
            evaluation. `train_and_evaluate` returns what they return at the end.

    Raises:
        TypeError: If `input_fn` cannot be called, or `name` is not a string.
        ValueError: If `steps` is not positive.
        EstimatorError: If a hook or an exporter is not a function.
    """

    input_fn: Callable[..., Any]
    steps: int | None = 100
    name: str | None = None
    hooks: Action | Sequence[Action] | None = None
    exporters: Callable[[Output], Any] | Sequence[Callable[[Output], Any]] | None = None

    def __post_init__(self) -> None:
        check_call(self.input_fn, self.name, steps=self.steps)
        as_hooks("hooks", self.hooks)
        as_hooks("exporters", self.exporters)


def check_call(input_fn: Any, name: Any = None, **numbers: int | None) -> None:
    """Raises if an input function, the name of an evaluation or a number is wrong."""
    check_input_fn(input_fn)
    check_instance("name", name, str | None, 'Write `name="test"`.')
    for which, number in numbers.items():
        if number is not None:
            check_positive_int(which, number)


def choose_directory(
    model_dir: str | os.PathLike[str] | None, config: RunConfig
) -> str:
    """Returns the directory of an estimator, in which no other process trains alone."""
    strategy = config.train_distribute
    plan = config.plan
    has_servers = isinstance(strategy, ParameterServerStrategy)
    joins = has_servers or (strategy is not None and not strategy.layout.peers.is_alone)
    has_others = plan.is_training and plan.is_distributed
    if has_others and not joins:
        raise EstimatorError(
            f"`train_distribute` is {strategy!r}, but the cluster has "
            f"{plan.num_processes} processes that train, and each would train "
            "alone into one directory. Use `RunConfig(train_distribute="
            "armillary.MultiWorkerMirroredStrategy(), ...)`."
        )

    given = _as_directory(model_dir)
    of_config = _as_directory(config.model_dir)
    are_both_given = given is not None and of_config is not None
    if are_both_given and given != of_config:
        raise EstimatorError(
            f"`model_dir` is {given!r}, but the `model_dir` of `config` is "
            f"{of_config!r}. Give one of them."
        )
    directory = given or of_config
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


def _as_directory(path: str | os.PathLike[str] | None) -> str | None:
    """Returns the absolute path of a directory; `None` if it is left out or empty."""
    if path is None or str(path) == "":
        return None
    return str(as_absolute("model_dir", path))
