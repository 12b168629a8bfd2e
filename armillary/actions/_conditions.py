"""Conditions and periods for actions, and the methods that a controller calls on them.

A controller calls these methods of each action, and of each action inside another, if
they exist: `bind_step_counter` with its step counter, `begin_training` when a call
begins to train, and `end_training` when it ends, even by an error.
"""

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import MethodType
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
from armillary._process import get_process
from armillary._records import find_numbers, write_whole
from armillary.state._summarize import as_step_counter
from armillary.typing import Action, Output

Metric: TypeAlias = str | Callable[[Output], Any]
"""A key of an output, a path such as `"validation/loss"`, or a function."""


def notify(actions: Iterable[Any], method: str, *arguments: Any) -> None:
    """Calls a method of all parts of actions; raises the first error at the end."""
    errors: list[Exception] = []
    for part in find_parts(actions):
        try:
            if hasattr(part, method):
                getattr(part, method)(*arguments)
        except Exception as error:
            errors.append(error)
    if errors:
        raise errors[0]


def find_parts(actions: Iterable[Any]) -> list[Any]:
    """Returns actions and all of their parts, each once."""
    found: dict[int, Any] = {}
    for action in actions:
        inner: tuple[Any, ...] = ()
        if isinstance(action, ConditionalAction):
            inner = action.condition, *action.actions
        elif isinstance(action, PeriodicAction):
            inner = action.actions
        elif isinstance(action, MethodType):
            inner = (action.__self__,)
        found |= {id(part): part for part in (action, *find_parts(inner))}
    return list(found.values())


class StepAction:
    """An action that uses the global step."""

    _read_step: Callable[[], int] | None = None
    last_step = 0  # the step of the last call

    def bind_step_counter(self, counter: Any) -> None:
        """Sets a step counter, such as `optimizer.step`; a `Controller` calls this."""
        self._read_step = as_step_counter(counter)
        self.last_step = self._read_step()

    def resume_at(self, step: int) -> None:
        """Continues after a last call at `step`; a `Controller` calls this."""
        self.last_step = step

    def _advance(self) -> tuple[int, int]:
        """Returns the global step of this method's last call, and the current one."""
        if self._read_step is None:
            raise RuntimeError(
                f"`{type(self).__name__}` was called, but it has no step counter. In a "
                "loop without a `Controller`, call "
                "`action.bind_step_counter(optimizer.step)` first."
            )
        last = self.last_step
        self.last_step = self._read_step()
        return last, self.last_step


def as_actions(name: str, actions: Any) -> tuple[Action, ...]:
    """Returns one action or several as a tuple; raises if one is not callable."""
    several = actions if isinstance(actions, list | tuple | Iterator) else [actions]
    found = tuple(several)
    for index, each in enumerate(found):
        check_callable(f"{name}[{index}]" if several is actions else name, each)
    return found


class ConditionalAction:
    """Runs an action, or several in turn, if a condition is true.

    Args:
        condition: Function of the output, such as a `NewBestMetric`.
        action: The action to run if the condition is true, or a sequence of actions.

    Raises:
        TypeError: If the condition or an action is not callable.
    """

    def __init__(
        self, condition: Callable[[Output], bool], action: Action | Iterable[Action]
    ) -> None:
        check_callable("condition", condition)
        self.condition = condition
        self.actions = as_actions("action", action)

    def __call__(self, output: Output) -> None:
        """Runs the actions with `output` if the condition is true for it."""
        if self.condition(output):
            for action in self.actions:
                action(output)


class PeriodicAction(StepAction):
    """Runs an action, or several in turn, each time that an interval has passed.

    It runs them at the first output after each multiple of the interval, even if the
    run was interrupted.

    Args:
        action: The action to run, or a sequence of actions.
        interval: Training steps between runs, even for an evaluation action.

    Raises:
        TypeError: If an action is not callable.
        ValueError: If the interval is not positive.
        RuntimeError: When it is called without a step counter.
    """

    def __init__(self, action: Action | Iterable[Action], interval: int) -> None:
        self.actions = as_actions("action", action)
        self.interval = check_positive_int("interval", interval)

    def __call__(self, output: Output) -> None:
        """Runs the actions with `output` if the interval has passed."""
        last, now = self._advance()
        if now // self.interval > last // self.interval:
            for action in self.actions:
                action(output)


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
        best = self.best_value
        if best is None or np.isnan(value):
            return not np.isnan(value)
        return value > best + margin if self.higher_is_better else value < best - margin


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
            chief writes. `None` keeps the value in memory only.

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
            content = {**self.get_state(), "higher_is_better": self.higher_is_better}
            path = epath.Path(self.file)
            data = json.dumps(content).encode()
            # A reader finds either the old file or the new file.
            write_whole(path, data, f".{path.name}.{os.getpid()}")
        return True

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
            self._request_stop(
                f"`{self._name}` has not improved by more than {self.min_delta:g} for "
                f"{self.patience} outputs in a row; the best value was "
                f"{self.best_value}, the last one {value}"
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
