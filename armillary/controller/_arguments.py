"""Checks of what a controller and its methods are given, before anything is touched."""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from armillary._checks import (
    check_callable,
    check_methods,
    check_num_steps,
    check_one_of,
    check_path,
    check_positive_int,
    check_seconds,
    is_positive_int,
)
from armillary.typing import Action


def check_runners(trainer: Any, evaluator: Any) -> None:
    """Raises if both are missing, or lack the method that the controller calls."""
    if trainer is None and evaluator is None:
        raise ValueError(
            "`trainer` and `evaluator` are both None, but a controller needs at least "
            "one of them. Pass `trainer=...`, `evaluator=...` or both."
        )
    if trainer is not None:
        fix = "Derive it from `armillary.StandardTrainer` or `AbstractTrainer`."
        check_methods("trainer", trainer, ["train"], fix)
    if evaluator is None:
        return
    if isinstance(evaluator, list | tuple):
        raise TypeError(
            f"`evaluator` is {evaluator!r} of type {type(evaluator).__name__}, but "
            "several evaluators need names: it must be one evaluator, or a dictionary "
            'of them. Use `evaluator={"validation": a, "test": b}`.'
        )
    fix = "Derive it from `armillary.StandardEvaluator` or `AbstractEvaluator`."
    if not isinstance(evaluator, Mapping):
        check_methods("evaluator", evaluator, ["evaluate"], fix)
        return
    if not evaluator:
        raise ValueError(
            "`evaluator` is an empty dictionary, but it must hold evaluators by name. "
            'Use `evaluator={"validation": ...}`, or `None`.'
        )
    for name, each in evaluator.items():
        is_word = isinstance(name, str) and name not in ("", ".", "..")
        if not is_word or "/" in name:
            raise ValueError(
                f"`evaluator` has the name {name!r}, but each evaluator needs one that "
                'a directory can have. Use `evaluator={"validation": ...}`.'
            )
        check_methods(f"evaluator[{name!r}]", each, ["evaluate"], fix)


def check_intervals(
    trainer: Any, steps_per_loop: Any, *, log_interval: Any, summary_interval: Any
) -> None:
    """Raises if the numbers of steps are not positive or do not fit each other."""
    if trainer is not None and steps_per_loop is None:
        raise ValueError(
            "`steps_per_loop` is None, but a controller with a `trainer` needs it. "
            "Pass the steps of one inner loop, such as `steps_per_loop=100`."
        )
    intervals = {
        "log_interval": (log_interval, "lines are logged"),
        "summary_interval": (summary_interval, "summaries are written"),
    }
    for name, (interval, _) in intervals.items():
        if interval is not None:
            check_positive_int(name, interval)
    if steps_per_loop is None or callable(steps_per_loop):
        return
    check_positive_int("steps_per_loop", steps_per_loop)
    for name, (interval, reason) in intervals.items():
        if interval is not None and interval % steps_per_loop:
            larger = (interval // steps_per_loop + 1) * steps_per_loop
            raise ValueError(
                f"`{name}` is {interval}, but it must be a multiple of "
                f"`steps_per_loop` ({steps_per_loop}), because {reason} "
                f"between loops. Use `{name}={larger}`."
            )


def check_steps_returned(num_steps: Any, step: int) -> int:
    """Returns what a function given as `steps_per_loop` returned, as an `int`."""
    if not is_positive_int(num_steps):
        raise ValueError(
            f"The function `steps_per_loop` returned {num_steps!r} at global step "
            f"{step}, but it must return how many steps the next loop has, a positive "
            "integer. Return at least 1 at every step, such as "
            "`max(1, int(num_steps))`."
        )
    return int(num_steps)


def as_actions(name: str, actions: Iterable[Action] | None) -> tuple[Action, ...]:
    """Returns `actions` as a tuple; `None` means there are none."""
    if actions is None:
        return ()
    is_text = isinstance(actions, str | bytes | Mapping)
    if callable(actions) or is_text or not np.iterable(actions):
        raise TypeError(
            f"`{name}` is {actions!r}, but it must be a sequence of actions. "
            f"Use `{name}=[action]`."
        )
    as_tuple = tuple(actions)
    for index, action in enumerate(as_tuple):
        check_callable(f"{name}[{index}]", action)
    return as_tuple


def check_managers(strategy: Any, checkpoint_manager: Any) -> None:
    """Raises if one is given and lacks the methods that the controller calls."""
    if strategy is not None:
        fix = "Use a strategy such as `armillary.MirroredStrategy()`."
        check_methods("strategy", strategy, ["scope"], fix)
    if checkpoint_manager is not None:
        methods = [
            "save",
            "restore",
            "restore_or_initialize",
            "sync",
            "bind_step_counter",
            "bind_evaluation",
            "is_due",
            "has_saved_step",
            "checkpoint",
        ]
        fix = "Use `armillary.CheckpointManager(checkpoint, directory)`."
        check_methods("checkpoint_manager", checkpoint_manager, methods, fix)


def check_summaries(**arguments: Any) -> None:
    """Raises if a `..._dir` is no path, or a `..._manager` lacks a method."""
    for name, value in arguments.items():
        if value is not None and name.endswith("_dir"):
            check_path(name, value)
        elif value is not None:
            fix = "Use `armillary.summary.SummaryManager(summary_dir)`."
            check_methods(name, value, ["write_summaries", "flush"], fix)


def check_watching(hang_timeout_seconds: Any, progress: Any) -> None:
    """Checks how a run is watched, by the program itself and by people."""
    if hang_timeout_seconds is not None:
        fix = "Use `hang_timeout_seconds=600`, or `None` to wait for ever."
        check_seconds("hang_timeout_seconds", hang_timeout_seconds, fix)
    fix = "Use `progress=False` to show nothing of what goes on."
    check_one_of("progress", progress, (None, True, False), fix)


def check_hyperparameters(hyperparameters: Any) -> dict[str, Any]:
    """Returns hyperparameters as a dictionary; of `None`, an empty one."""
    if hyperparameters is None:
        return {}
    if not isinstance(hyperparameters, Mapping):
        raise TypeError(
            f"`hyperparameters` is {hyperparameters!r} of type "
            f"{type(hyperparameters).__name__}, but it must be a dictionary. Use "
            "`vars(arguments)` of parsed arguments, or `dataclasses.asdict(config)`."
        )
    bad = [name for name in hyperparameters if not isinstance(name, str)]
    if bad:
        raise TypeError(
            f"`hyperparameters` has the key {bad[0]!r} of type "
            f"{type(bad[0]).__name__}, but its keys must be strings. Use `str(key)`."
        )
    return dict(hyperparameters)


def require(controller: Any, attribute: str, *, for_method: str) -> Any:
    """Returns an attribute of a controller that a method needs."""
    value = getattr(controller, attribute)
    if value is None:
        raise ValueError(
            f"`{attribute}` is None, but `{for_method}` needs it. Pass "
            f"`{attribute}=...` to `Controller`."
        )
    return value


def check_target(name: str, steps: Any, step: int, epochs: Any) -> None:
    """Raises if training cannot go on from global step `step` up to `steps`."""
    check_num_steps(name, steps)
    if epochs is not None:
        check_positive_int("epochs", epochs)
    if steps != -1 and steps < step:
        raise ValueError(
            f"`{name}` is {steps}, but the global step is already {step}, and "
            f"`{name}` is the step to train up to. Use `{name}={step}` or more."
        )
