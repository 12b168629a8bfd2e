"""Finds one number in the output of a loop."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias

import numpy as np

from armillary._checks import check_one_of
from armillary.typing import Output

Metric: TypeAlias = str | Callable[[Output], Any]
"""A key of an output, a path such as `"validation/loss"`, or a function of one."""


def check_metric(metric: Any, higher_is_better: Any) -> None:
    """Raises if `metric` is not a kind of `Metric`, or its direction no `bool`."""
    if not callable(metric) and not (isinstance(metric, str) and metric.strip()):
        raise TypeError(
            f"`metric` is {metric!r} of type {type(metric).__name__}, but it must be a "
            "key of the output or a function of it. "
            'Use a string such as `metric="loss"`.'
        )
    check_one_of("higher_is_better", higher_is_better, (True, False))


def read_metric(metric: Metric, output: Output) -> float:
    """Returns the value of `metric` in `output`."""
    value = metric(output) if callable(metric) else _find(metric, output or {})
    if np.ndim(value) != 0:
        raise ValueError(
            f"`metric` {describe(metric)} has shape {np.shape(value)}, but it must be "
            "a scalar. Use a function that reduces it to one number."
        )
    try:
        return float(value)
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"`metric` {describe(metric)} is {value!r} of type {type(value).__name__}, "
            "but it must be a number. Use another key, or a function that returns one."
        ) from error


def describe(metric: Metric) -> str:
    """Returns how a message names `metric`."""
    if isinstance(metric, str):
        return f"`{metric}`"
    return f"`{getattr(metric, '__name__', type(metric).__name__)}`"


def is_better(value: float, best: float | None, *, higher: bool, margin: float) -> bool:
    """Returns whether `value` is better than `best` by more than `margin`.

    NaN is never better than anything, and any other value is better than `None`.
    """
    if np.isnan(value):
        return False
    if best is None:
        return True
    return value > best + margin if higher else value < best - margin


def _find(path: str, output: Mapping[str, Any]) -> Any:
    if path in output:
        return output[path]
    value: Any = output
    for name in path.split("/"):
        if not isinstance(value, Mapping) or name not in value:
            available = ", ".join(f"`{key}`" for key in _paths(output)) or "no keys"
            raise ValueError(
                f"`metric` is {path!r}, which the output does not have. "
                f"It has {available}. Use one of its keys, or a function of the output."
            )
        value = value[name]
    return value


def _paths(output: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for name, value in output.items():
        if isinstance(value, Mapping):
            yield from _paths(value, f"{prefix}{name}/")
        else:
            yield f"{prefix}{name}"
