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
from armillary.summary._metrics_file import MetricsFile
from armillary.typing import Action


def run_evaluation(
    evaluator: Any,
    num_steps: int,
    *,
    step: int,
    scope: Callable[[], AbstractContextManager[Any]],
    goodput: Recorder,
    summary_manager: SummaryManager | NoopSummaryManager,
    metrics_file: MetricsFile,
    actions: tuple[Action, ...],
) -> dict[str, Any]:
    """Evaluates `num_steps` steps, or all for -1; returns NumPy values.

    Args:
        evaluator: Runs the steps.
        num_steps: How many.
        step: The global step.
        scope: Returns what is entered around the evaluator and the actions.
        goodput: Accounts for the time.
        summary_manager: Writes the output.
        metrics_file: Writes its scalars.
        actions: Called with the output.
    """
    # The data may end before so many steps.
    amount = "complete" if num_steps == -1 else f"up to {num_steps} steps of"
    log_line("eval", step, f"running {amount} evaluation...")
    start = time.perf_counter()
    with goodput.phase(Category.EVALUATING):
        with scope():
            output = evaluator.evaluate(num_steps)
        output = fetch_output(output, "evaluator.evaluate")
    seconds = time.perf_counter() - start
    expire_boundary()
    goodput.mark("evaluation", step)
    log_line(
        "eval",
        step,
        f"eval time: {seconds: 6.1f} sec",
        f"output: {format_output(output)}",
    )
    summary_manager.write_summaries(output, step=step)
    summary_manager.flush()
    metrics_file.write("eval", step, name="", seconds=seconds, values=output)
    metrics_file.flush()
    with scope():
        for action in actions:
            expire_boundary()
            action(output)
    return output
