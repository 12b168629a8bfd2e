"""Runs evaluations and reports them: log lines, summaries, the eval actions."""

import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

from armillary.cluster._join import expire_boundary
from armillary.controller._progress import fetch_output, format_output, log_line
from armillary.goodput._category import Category
from armillary.goodput._recorder import Recorder
from armillary.summary._manager import NoopSummaryManager, SummaryManager
from armillary.summary._metrics_file import MetricsFile
from armillary.typing import Action


def run_evaluations(
    evaluator: Any,
    num_steps: int,
    *,
    scope: Callable[[], AbstractContextManager[Any]],
    actions: tuple[Action, ...],
    **others: Any,
) -> dict[str, Any]:
    """Runs one evaluation, or those that have names; returns NumPy values.

    Args:
        evaluator: Runs the steps; or several by name, whose outputs are then nested.
        num_steps: How many of each.
        scope: As in `run_evaluation`.
        actions: Called once, with the whole output.
        **others: As in `run_evaluation`.
    """
    if isinstance(evaluator, Mapping):
        output = {
            name: run_evaluation(each, num_steps, name=name, scope=scope, **others)
            for name, each in evaluator.items()
        }
    else:
        output = run_evaluation(evaluator, num_steps, name="", scope=scope, **others)
    with scope():
        for action in actions:
            expire_boundary()
            action(output)
    return output


def run_evaluation(
    evaluator: Any,
    num_steps: int,
    *,
    name: str,
    step: int,
    scope: Callable[[], AbstractContextManager[Any]],
    goodput: Recorder,
    summary_manager: SummaryManager | NoopSummaryManager,
    metrics_file: MetricsFile,
) -> dict[str, Any]:
    """Evaluates `num_steps` steps, or all for -1; returns NumPy values.

    Args:
        evaluator: Runs the steps.
        num_steps: How many.
        name: Which of several evaluations this is; empty if there is one.
        step: The global step.
        scope: Returns what is entered around the evaluator and the actions.
        goodput: Accounts for the time.
        summary_manager: Writes the output, below its name.
        metrics_file: Writes its scalars.
    """
    named = [name] if name else []
    # The data may end before so many steps.
    amount = "complete" if num_steps == -1 else f"up to {num_steps} steps of"
    log_line("eval", step, *named, f"running {amount} evaluation...")
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
        *named,
        f"eval time: {seconds: 6.1f} sec",
        f"output: {format_output(output)}",
    )
    summary_manager.write_summaries({name: output} if name else output, step=step)
    summary_manager.flush()
    metrics_file.write("eval", step, name=name, seconds=seconds, values=output)
    metrics_file.flush()
    return output
