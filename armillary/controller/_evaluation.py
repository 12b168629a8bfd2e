"""Runs one evaluation and reports it: a log line, summaries, the eval actions."""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from armillary.cluster._join import expire_boundary
from armillary.controller._progress import fetch_output, format_output, log_line
from armillary.goodput._category import Category
from armillary.goodput._recorder import Recorder
from armillary.summary._manager import NoopSummaryManager, SummaryManager
from armillary.typing import Action


class Evaluation:
    """What a controller does each time it evaluates.

    Args:
        evaluator: Runs the steps; may be `None` if nothing is evaluated.
        read_step: Returns the global step.
        scope: Returns what is entered around the evaluator and the actions.
        goodput: Accounts for the time.
        summary_manager: Writes the output.
        actions: Called with the output.
    """

    def __init__(
        self,
        evaluator: Any,
        read_step: Callable[[], int],
        scope: Callable[[], AbstractContextManager[Any]],
        goodput: Recorder,
        *,
        summary_manager: SummaryManager | NoopSummaryManager,
        actions: tuple[Action, ...],
    ) -> None:
        self._evaluator, self._read_step = evaluator, read_step
        self._scope, self._goodput = scope, goodput
        self._summary_manager, self._actions = summary_manager, actions

    def run(self, num_steps: int) -> dict[str, Any]:
        """Evaluates `num_steps` steps, or all for -1; returns NumPy values."""
        step = self._read_step()
        amount = (
            "complete evaluation"
            if num_steps == -1
            else f"{num_steps} steps of evaluation"
        )
        log_line("eval", step, f"running {amount}...")

        start = time.perf_counter()
        with self._goodput.phase(Category.EVALUATING):
            with self._scope():
                output = self._evaluator.evaluate(num_steps)
            output = fetch_output(output, "evaluator.evaluate")
        seconds = time.perf_counter() - start
        self._goodput.mark("evaluation", step)

        log_line(
            "eval",
            step,
            *([f"steps/sec: {num_steps / seconds: 6.1f}"] if num_steps > 0 else []),
            f"eval time: {seconds: 6.1f} sec",
            f"output: {format_output(output)}",
        )
        self._summary_manager.write_summaries(output, step=step)
        self._summary_manager.flush()
        with self._scope():
            for action in self._actions:
                expire_boundary()
                action(output)
        return output
