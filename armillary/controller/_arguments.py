"""The arguments of a controller and of its methods, checked before use."""

import math
from collections.abc import Mapping
from typing import Any

from armillary._checks import (
    check_instance,
    check_methods,
    check_not_negative,
    check_num_steps,
    check_one_of,
    check_path,
    check_positive_int,
    check_seconds,
)
from armillary.state._step_counter import as_step_counter
from armillary.trainer._contract import AbstractTrainer
from armillary.trainer._datasets import flatten_datasets
from armillary.trainer._standard_evaluator import StandardEvaluator, check_ends

_SUMMARIES = (
    ["write_summaries", "flush"],
    "Use `armillary.summary.SummaryManager(summary_dir)`.",
)
# For each argument, the methods that the controller calls, and a fix.
_METHODS = {
    "strategy": (["scope"], "Use a strategy such as `armillary.MirroredStrategy()`."),
    "checkpoint_manager": (
        ["save", "restore", "restore_or_initialize", "sync", "checkpoint"],
        "Use `armillary.CheckpointManager(checkpoint, directory)`.",
    ),
    "summary_manager": _SUMMARIES,
    "eval_summary_manager": _SUMMARIES,
}
# Smaller numbers are peaks in TFLOP/s or GFLOP/s.
_MIN_PEAK = 1e6
_EVALUATOR = (
    "Derive it from `armillary.StandardEvaluator` or `AbstractEvaluator`; several need "
    'names: `evaluator={"validation": a, "test": b}`.'
)


def check_arguments(arguments: Mapping[str, Any]) -> None:
    """Raises if an argument of a controller is wrong, before anything is restored."""
    trainer = arguments["trainer"]
    evaluator = arguments["evaluator"]
    if trainer is None and evaluator is None:
        raise ValueError(
            "`trainer` and `evaluator` are both None, but a controller needs at least "
            "one of them. Pass `trainer=...`, `evaluator=...` or both."
        )
    fix = "Pass an instance of `armillary.StandardTrainer`, or of `AbstractTrainer`."
    check_instance("trainer", trainer, AbstractTrainer | None, fix)
    _check_evaluator(evaluator)
    as_step_counter(arguments["global_step"])
    for name, (methods, fix) in _METHODS.items():
        if arguments[name] is not None:
            check_methods(name, arguments[name], methods, fix)
    _check_intervals(arguments)
    for name in ("summary_dir", "eval_summary_dir"):
        if arguments[name] is not None:
            check_path(name, arguments[name])

    seconds = arguments["hang_timeout_seconds"]
    is_forever = isinstance(seconds, float) and seconds == math.inf
    if seconds is not None and not is_forever:
        fix = "Use `hang_timeout_seconds=600`, or `math.inf` to wait forever."
        check_seconds("hang_timeout_seconds", seconds, fix)
    check_one_of("progress", arguments["progress"], (True, False))
    if arguments["tokens_per_example"] is not None:
        check_positive_int("tokens_per_example", arguments["tokens_per_example"])
    if arguments["peak_flops"] is not None:
        _check_peak(arguments["peak_flops"])
    fix = "Use `vars(arguments)` of parsed arguments, or `dataclasses.asdict(config)`."
    check_instance("hyperparameters", arguments["hyperparameters"], Mapping | None, fix)


def _check_peak(peak_flops: Any) -> None:
    peak = check_not_negative("peak_flops", peak_flops)
    if peak < _MIN_PEAK:
        raise ValueError(
            f"`peak_flops` is {peak_flops!r}, but it must be the peak FLOP/s of one "
            f"device, at least {_MIN_PEAK:,.0f}. A peak of 989 TFLOP/s is "
            "`peak_flops=989e12`."
        )


def _check_evaluator(evaluator: Any) -> None:
    several = evaluator if isinstance(evaluator, Mapping) else {}
    for name, one in several.items():
        if not _can_name_directory(name):
            raise ValueError(
                f"`evaluator` has the name {name!r}, but each evaluator needs one that "
                'a directory can have. Use `evaluator={"validation": ...}`.'
            )
        check_methods(f"evaluator[{name!r}]", one, ["evaluate"], _EVALUATOR)
    if not several and evaluator is not None:
        check_methods("evaluator", evaluator, ["evaluate"], _EVALUATOR)


def _can_name_directory(name: Any) -> bool:
    is_text = isinstance(name, str)
    return is_text and name not in ("", ".", "..") and "/" not in name


def _check_intervals(arguments: Mapping[str, Any]) -> None:
    """Raises if numbers of steps are not positive or do not fit each other."""
    steps_per_loop = arguments["steps_per_loop"]
    if arguments["trainer"] is not None and steps_per_loop is None:
        raise ValueError(
            "`steps_per_loop` is None, but a controller with a `trainer` needs it. "
            "Pass the steps of one inner loop, such as `steps_per_loop=100`."
        )
    is_number = steps_per_loop is not None and not callable(steps_per_loop)
    if is_number:
        check_positive_int("steps_per_loop", steps_per_loop)
    for name in ("log_interval", "summary_interval"):
        interval = arguments[name]
        if interval is None:
            continue
        check_positive_int(name, interval)
        if is_number and interval % steps_per_loop:
            larger = (interval // steps_per_loop + 1) * steps_per_loop
            raise ValueError(
                f"`{name}` is {interval}, but it must be a multiple of "
                f"`steps_per_loop` ({steps_per_loop}), because it can end only between "
                f"loops. Use `{name}={larger}`."
            )


def require(controller: Any, *attributes: str, for_method: str) -> None:
    """Raises if a controller lacks an argument that a method needs."""
    for attribute in attributes:
        if getattr(controller, attribute) is None:
            raise ValueError(
                f"`{attribute}` is None, but `{for_method}` needs it. Pass "
                f"`{attribute}=...` to `Controller`."
            )


def check_target(
    name: str, steps: Any, step: int, epochs: Any, *, may_be_past: bool
) -> None:
    """Raises if training cannot continue from global step `step` up to `steps`.

    `may_be_past` says that the trainer itself decides where its loops end. So its last
    loop may have gone past `steps`.
    """
    check_num_steps(name, steps)
    if epochs is not None:
        check_positive_int("epochs", epochs)
    if steps != -1 and steps < step and not may_be_past:
        raise ValueError(
            f"`{name}` is {steps}, but the global step is already {step}, and "
            f"`{name}` is the step to train up to. Use `{name}={step}` or more."
        )


def check_evaluations_end(evaluator: Any, eval_steps: int) -> None:
    """Raises, before training begins, if an evaluation would never end."""
    several = evaluator.values() if isinstance(evaluator, Mapping) else [evaluator]
    for evaluator in several:
        method = getattr(type(evaluator), "evaluate", None)
        if method is StandardEvaluator.evaluate:
            datasets, _ = flatten_datasets(evaluator.eval_dataset)
            check_ends("eval_steps", eval_steps, datasets)
