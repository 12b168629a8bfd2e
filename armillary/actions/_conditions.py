"""Ends training when a metric no longer improves.

Finds one number in the output of a loop.

An action that runs only when a condition on the output holds.

A condition that holds when a metric is better than ever before.
"""

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias
from urllib.parse import quote

import numpy as np
from etils import epath

from armillary._checks import (
    answers_old_names,
    check_callable,
    check_not_negative,
    check_one_of,
    check_path,
    check_positive_int,
)
from armillary._process import get_process
from armillary._records import write_whole
from armillary.actions._step_action import (
    as_actions,
    bind_step_counter,
    end_training,
)
from armillary.typing import Action, Output

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


class ConditionalAction:
    """Runs an action, or several in turn, if a condition holds.

    Args:
        condition: Function of the output, such as a `NewBestMetric`.
        action: What to run if the condition is true: one action or a sequence of them.

    Raises:
        TypeError: If the condition or an action is not callable.
    """

    def __init__(
        self, condition: Callable[[Output], bool], action: Action | Iterable[Action]
    ) -> None:
        check_callable("condition", condition)
        self.condition = condition
        self.actions = as_actions(action)

    def __call__(self, output: Output) -> None:
        """Runs the actions with `output` if the condition is true for it."""
        if self.condition(output):
            for action in self.actions:
                action(output)

    def bind_step_counter(self, counter: Any) -> None:
        """Tells the condition and the actions what counts training steps.

        Args:
            counter: A variable such as `optimizer.step`, or a function.
        """
        bind_step_counter((self.condition, *self.actions), counter)

    def end_training(self) -> None:
        """Tells the condition and the actions that training has ended."""
        end_training((self.condition, *self.actions))


@answers_old_names(
    filename="Use `directory`, in which it makes a file named for the metric."
)
class NewBestMetric:
    """Holds when the metric of an output is strictly better than all before.

    `test` only asks, `commit` also remembers the new value, and calling the object is
    the same as `commit`. Use `test` as a condition and `commit` as the last action, and
    a new best whose actions were interrupted is found again after a restart.

    The best value survives a restart if `directory` is given, or if the object is part
    of a `Checkpoint`.

    Args:
        metric: Key in the output, a path such as `"validation/loss"` into a nested one,
            or a function from the output to a number. NaN is never the best value.
        higher_is_better: Whether a larger value is better: true for an accuracy, false
            for a loss.
        directory: Where to keep the best value, in a JSON file named for the metric. It
            is made when the first value is written. `None` keeps it in memory only.
        write_metric: Whether to write the file; if false, it is only read when the
            object is made. Of several processes, only the chief writes in any case.

    Attributes:
        best_value: The best value so far, or `None` before the first one.
        file: Where it is kept, or `None`.

    Raises:
        TypeError: If `metric` is neither a string nor callable.
        ValueError: If `higher_is_better` is neither true nor false, if `directory` is
            given with a function that has no name to call the file by, or if the file
            there is not this metric's.
    """

    def __init__(
        self,
        metric: Metric,
        *,
        higher_is_better: bool,
        directory: str | os.PathLike[str] | None = None,
        write_metric: bool = True,
    ) -> None:
        check_metric(metric, higher_is_better)
        check_one_of("write_metric", write_metric, (True, False))
        self.metric = metric
        self.higher_is_better = higher_is_better
        self.write_metric = write_metric
        self.best_value: float | None = None
        self.file: Path | None = None
        if directory is not None:
            self.file = (
                Path(check_path("directory", directory))
                / f"best_{quote(_file_key(metric), safe='')}.json"
            )
            self._read_file()

    def __call__(self, output: Output) -> bool:
        """Returns whether `output` has a new best value, and remembers it."""
        return self.commit(output)

    def test(self, output: Output) -> bool:
        """Returns whether `output` has a new best value, without remembering it."""
        value = self.metric_value(output)
        higher = self.higher_is_better
        return is_better(value, self.best_value, higher=higher, margin=0.0)

    def commit(self, output: Output) -> bool:
        """Returns whether `output` has a new best value, and remembers it."""
        if not self.test(output):
            return False
        self.best_value = self.metric_value(output)
        is_writer = self.write_metric and get_process().is_chief
        if self.file is not None and is_writer:
            self._write_file(self.file)
        return True

    def metric_value(self, output: Output) -> float:
        """Returns the value of the metric in `output`.

        Raises:
            ValueError: If the output has no such key, or the value is not a scalar.
            TypeError: If the value is not a number.
        """
        return read_metric(self.metric, output)

    def get_state(self) -> dict[str, Any]:
        """Returns what a `Checkpoint` saves."""
        return {"best_value": self.best_value}

    def set_state(self, state: dict[str, Any]) -> None:
        """Takes over what a `Checkpoint` saved."""
        self.best_value = state["best_value"]

    def _read_file(self) -> None:
        if self.file is None or not self.file.exists():
            return
        try:
            content = json.loads(self.file.read_text(encoding="utf-8"))
            higher_is_better = content["higher_is_better"]
            best_value = float(content["best_value"])
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(
                f"{self.file} cannot be read as the best value of "
                f"{describe(self.metric)}: {error!r}. Delete the file to start afresh."
            ) from error
        if higher_is_better != self.higher_is_better:
            raise ValueError(
                f"`higher_is_better` is {self.higher_is_better}, but {self.file} was "
                f"written with {higher_is_better}. Use "
                f"`higher_is_better={higher_is_better}`, or delete the file."
            )
        self.best_value = best_value

    def _write_file(self, file: Path) -> None:
        content = {
            "best_value": self.best_value,
            "higher_is_better": self.higher_is_better,
        }
        # A reader finds the old file or the new one.
        data = json.dumps(content).encode()
        write_whole(epath.Path(file), data, f".{file.name}.{os.getpid()}")


def _file_key(metric: Metric) -> str:
    if isinstance(metric, str):
        return metric
    name = getattr(metric, "__name__", "<unnamed>")
    if not name.isidentifier():
        raise ValueError(
            f"`metric` is the function {name}, but the file in `directory` is called "
            "by the name of the metric. Use a key of the output, or a function that is "
            "defined with `def`."
        )
    return name


class EarlyStopping:
    """Requests a stop after a number of outputs in a row without improvement.

    Use it as an evaluation action, or as a training action to judge each loop. A
    controller takes its actions when it is made, so hand over its method late::

        early_stopping = EarlyStopping(
            lambda reason: controller.request_stop(reason),
            "loss", patience=3, higher_is_better=False)
        controller = armillary.Controller(..., eval_actions=[early_stopping])

    As part of a `Checkpoint`, the best value and the count survive a restart, and a run
    that was stopped stays stopped: started again, it trains nothing, unless `patience`
    is larger now. A later call in the same program gets its patience back.

    Args:
        request_stop: A controller, or a function that takes the reason to stop.
        metric: Key in the output, a path such as `"validation/loss"` into a nested one,
            or a function from the output to a number. NaN is no improvement.
        patience: Outputs in a row without improvement after which to stop, at least 1.
        min_delta: By how much a value must be better than the best to count.
        higher_is_better: Whether a larger value is better: true for an accuracy, false
            for a loss.

    Attributes:
        best_value: The best value so far, or `None` before the first one.
        num_without_improvement: Outputs since the best value.

    Raises:
        TypeError: If `request_stop` or `metric` is of another kind.
        ValueError: If `patience` is below 1, `min_delta` is negative, or
            `higher_is_better` is neither true nor false.
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
        check_metric(metric, higher_is_better)
        self.metric = metric
        self.patience = check_positive_int("patience", patience)
        self.min_delta = check_not_negative("min_delta", min_delta)
        self.higher_is_better = higher_is_better
        self.best_value: float | None = None
        self.num_without_improvement = 0
        self._was_stopped = False

    def __call__(self, output: Output) -> None:
        """Judges one output, and requests a stop if patience has run out."""
        self._start_afresh()
        value = read_metric(self.metric, output)
        higher = self.higher_is_better
        if is_better(value, self.best_value, higher=higher, margin=self.min_delta):
            self.best_value = value
            self.num_without_improvement = 0
            return
        self.num_without_improvement += 1
        if self.num_without_improvement >= self.patience:
            self._request_stop(
                f"{describe(self.metric)} has not improved by more than "
                f"{self.min_delta:g} for {self.patience} outputs in a row; "
                f"the best value was {self.best_value}, the last one {value}"
            )

    def begin_training(self) -> None:
        """Requests a stop if a checkpoint says so; a `Controller` calls this."""
        if not self._was_stopped:
            self._start_afresh()
            return
        self._was_stopped = False
        self._request_stop(
            f"{describe(self.metric)} had not improved for "
            f"{self.num_without_improvement} outputs in a row when this was saved; "
            f"the best value was {self.best_value}. A larger `patience` trains on"
        )

    def _start_afresh(self) -> None:
        """Gives a call after one that was stopped its patience back."""
        if self.num_without_improvement >= self.patience:
            self.num_without_improvement = 0

    def get_state(self) -> dict[str, Any]:
        """Returns what a `Checkpoint` saves."""
        return {
            "best_value": self.best_value,
            "num_without_improvement": self.num_without_improvement,
        }

    def set_state(self, state: dict[str, Any]) -> None:
        """Takes over what a `Checkpoint` saved."""
        self.best_value = state["best_value"]
        self.num_without_improvement = state["num_without_improvement"]
        self._was_stopped = self.num_without_improvement >= self.patience
