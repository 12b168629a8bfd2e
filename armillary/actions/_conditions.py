"""Conditions on the best value of a metric: new best values, and early stopping."""

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeAlias
from urllib.parse import quote

import numpy as np
from etils import epath

from armillary._checks import (
    check_callable,
    check_not_negative,
    check_one_of,
    check_path,
    check_positive_int,
)
from armillary._json_values import find_numbers
from armillary._process import get_process
from armillary._records import write_whole
from armillary.typing import Output

Metric: TypeAlias = str | Callable[[Output], Any]
"""A key of an output, a path such as `"validation/loss"`, or a function."""


class _BestValue:
    """The best value of a metric so far; `None` before the first value."""

    def __init__(self, metric: Metric, higher_is_better: bool) -> None:
        is_key = isinstance(metric, str) and bool(metric.strip())
        if not (is_key or callable(metric)):
            raise TypeError(
                f"`metric` is {metric!r} of type {type(metric).__name__}, but it must "
                'be a key of the output, such as `metric="loss"`, or a function of it.'
            )
        check_one_of("higher_is_better", higher_is_better, (True, False))
        self.metric = metric
        self.higher_is_better = higher_is_better
        self.best_value: float | None = None
        kind = type(metric).__name__
        self._name = str(metric if is_key else getattr(metric, "__name__", kind))

    def metric_value(self, output: Output) -> float:
        """Returns the value of the metric in `output`.

        Raises:
            ValueError: If the output has no such key.
            TypeError: If the value is not one number.
        """
        metric = self.metric
        is_key = isinstance(metric, str)
        value = _find(metric, output or {}) if is_key else metric(output)
        try:
            if np.iscomplexobj(value):
                raise TypeError
            return float(np.asarray(value)[()])
        except (TypeError, ValueError):
            raise TypeError(
                f"`metric` `{self._name}` is {value!r} of type {type(value).__name__}, "
                "but it must be one number. Use a function that returns a number."
            ) from None

    def get_state(self) -> dict[str, Any]:
        """Returns the state for a `Checkpoint`."""
        return {"best_value": self.best_value}

    def set_state(self, state: dict[str, Any]) -> None:
        """Restores the state from a `Checkpoint`."""
        self.best_value = state["best_value"]

    def _is_better(self, value: float, margin: float = 0.0) -> bool:
        if np.isnan(value):
            return False
        best = self.best_value
        if best is None:
            return True
        if self.higher_is_better:
            return value > best + margin
        return value < best - margin


def _find(path: str, output: Mapping[str, Any]) -> Any:
    if path in output:
        return output[path]
    value: Any = output
    for name in path.split("/"):
        if not isinstance(value, Mapping) or name not in value:
            available = ", ".join(f"`{key}`" for key in find_numbers(output))
            raise ValueError(
                f"`metric` is {path!r}, which the output does not have. Use one of its "
                f"keys ({available or 'there are none'}), or a function of the output."
            )
        value = value[name]
    return value


class NewBestMetric(_BestValue):
    """A condition that is true if a metric is strictly better than ever before.

    `test` only compares, and `commit` also stores the new value. Calling the object is
    the same as `commit`. Use `test` as a condition and `commit` as the last action: if
    the actions for a new best are interrupted, they run again after a restart.

    The best value survives a restart if `directory` is given, or if the object is part
    of a `Checkpoint`.

    Args:
        metric: Key in the output, a path such as `"validation/loss"` into a nested
            output, or a function from the output to a number. NaN is never the best
            value.
        higher_is_better: Whether a larger value is better: true for an accuracy, false
            for a loss.
        directory: Directory for the best value, in a JSON file named for the metric. It
            is made when the first value is written. In a job of several processes, the
            chief writes, and each process reads when the object is made. So all of them
            need the same directory, on a shared disk. Otherwise, they would decide
            differently after a restart, and wait for each other in actions that all
            must run. Without a shared disk, make the object part of a `Checkpoint`.
            `None` keeps the value in memory only.

    Attributes:
        best_value: The best value so far, or `None` before the first value.
        file: The file that stores the best value, or `None`.

    Raises:
        TypeError: If `metric` is neither a string nor callable.
        ValueError: If `higher_is_better` is neither true nor false, a function for
            `directory` has no name, or the file there is not this metric's.
    """

    def __init__(
        self,
        metric: Metric,
        *,
        higher_is_better: bool,
        directory: str | os.PathLike[str] | None = None,
    ) -> None:
        super().__init__(metric, higher_is_better)
        self.file: Path | None = None
        if directory is None:
            return
        if callable(metric) and not self._name.isidentifier():
            raise ValueError(
                f"`metric` is the function {self._name}, but the file in `directory` "
                "is named for the function. Use a function that is defined with `def`."
            )
        folder = Path(check_path("directory", directory))
        self.file = folder / f"best_{quote(self._name, safe='')}.json"
        if self.file.exists():
            self.best_value = self._read(self.file)

    def __call__(self, output: Output) -> bool:
        """Returns whether `output` has a new best value, and stores it."""
        return self.commit(output)

    def test(self, output: Output) -> bool:
        """Returns whether `output` has a new best value, without storing it."""
        return self._is_better(self.metric_value(output))

    def commit(self, output: Output) -> bool:
        """Returns whether `output` has a new best value, and stores it."""
        if not self.test(output):
            return False
        self.best_value = self.metric_value(output)
        if self.file is not None and get_process().is_chief:
            self._write(self.file)
        return True

    def _write(self, file: Path) -> None:
        content = {**self.get_state(), "higher_is_better": self.higher_is_better}
        data = json.dumps(content).encode()
        # A reader finds either the old file or the new file.
        write_whole(epath.Path(file), data, f".{file.name}.{os.getpid()}")

    def _read(self, file: Path) -> float:
        try:
            content = json.loads(file.read_text(encoding="utf-8"))
            if content["higher_is_better"] != self.higher_is_better:
                raise ValueError("it has another `higher_is_better`")
            return float(content["best_value"])
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(
                f"{file} cannot be read as the best value of `{self._name}`: "
                f"{error!r}. Delete the file to start again."
            ) from error


class EarlyStopping(_BestValue):
    """Requests a stop after a number of outputs in a row without improvement.

    Use it as an evaluation action, or as a training action to check each loop. A
    controller takes its actions when it is made, so pass its method in a `lambda`::

        early_stopping = EarlyStopping(
            lambda reason: controller.request_stop(reason),
            "loss", patience=3, higher_is_better=False)
        controller = armillary.Controller(..., eval_actions=[early_stopping])

    As part of a `Checkpoint`, the best value and the count survive a restart. If a run
    that was stopped is started again, it trains nothing, unless `patience` is larger
    now. A later call in the same program starts to count again.

    Args:
        request_stop: A controller, or a function that takes the reason to stop.
        metric: As in `NewBestMetric`. NaN is not an improvement.
        patience: Outputs in a row without improvement after which to stop, at least 1.
        min_delta: The smallest difference from the best value that counts as an
            improvement.
        higher_is_better: Whether a larger value is better, as in `NewBestMetric`.

    Attributes:
        best_value: The best value so far, or `None` before the first value.
        num_without_improvement: Outputs since the best value.

    Raises:
        TypeError: If `request_stop` or `metric` is of the wrong type.
        ValueError: If another argument has a wrong value.
    """

    def __init__(
        self,
        request_stop: Any,
        metric: Metric,
        patience: int,
        min_delta: float = 0.0,
        *,
        higher_is_better: bool,
    ) -> None:
        self._request_stop: Callable[[str], None] = getattr(
            request_stop, "request_stop", request_stop
        )
        check_callable("request_stop", self._request_stop)
        super().__init__(metric, higher_is_better)
        self.patience = check_positive_int("patience", patience)
        self.min_delta = check_not_negative("min_delta", min_delta)
        self.num_without_improvement = 0
        self._was_stopped = False

    def __call__(self, output: Output) -> None:
        """Checks one output, and requests a stop if patience has run out."""
        self._start_again()
        value = self.metric_value(output)
        if self._is_better(value, self.min_delta):
            self.best_value = value
            self.num_without_improvement = 0
            return
        self.num_without_improvement += 1
        if self.num_without_improvement >= self.patience:
            best = self.best_value
            shown = "None" if best is None else f"{best:.6g}"
            self._request_stop(
                f"`{self._name}` has not improved by more than {self.min_delta:g} for "
                f"{self.patience} outputs in a row; the best value was {shown}, the "
                f"last one {value:.6g}"
            )

    def begin_training(self) -> None:
        """Requests a stop if the saved run was stopped; a `Controller` calls this."""
        if not self._was_stopped:
            self._start_again()
            return
        self._was_stopped = False
        self._request_stop(
            f"`{self._name}` had not improved for {self.num_without_improvement} "
            "outputs in a row when this was saved; a larger `patience` continues"
        )

    def _start_again(self) -> None:
        # After a stopped call, the next call starts to count again.
        if self.num_without_improvement >= self.patience:
            self.num_without_improvement = 0

    def get_state(self) -> dict[str, Any]:
        """Returns the state for a `Checkpoint`."""
        count = self.num_without_improvement
        return {**super().get_state(), "num_without_improvement": count}

    def set_state(self, state: dict[str, Any]) -> None:
        """Restores the state from a `Checkpoint`."""
        super().set_state(state)
        self.num_without_improvement = state["num_without_improvement"]
        self._was_stopped = self.num_without_improvement >= self.patience
