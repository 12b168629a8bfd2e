"""Ends training when a metric no longer improves."""

from collections.abc import Callable
from typing import Any

from armillary._checks import check_callable, check_not_negative, check_positive_int
from armillary.actions._metric import (
    Metric,
    check_metric,
    describe,
    is_better,
    read_metric,
)
from armillary.typing import Output


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
