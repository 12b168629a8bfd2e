"""Runs evaluations and reports them: log lines, summaries, the eval actions."""

import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any

from armillary.cluster._join import expire_boundary
from armillary.controller._curves import Curves
from armillary.controller._progress import fetch_output, format_output, log_line
from armillary.goodput._category import Category
from armillary.goodput._recorder import Recorder
from armillary.typing import Action


def run_evaluations(
    evaluator: Any,
    num_steps: int,
    *,
    step: int,
    scope: Callable[[], AbstractContextManager[Any]],
    goodput: Recorder,
    curves: Curves,
    actions: Iterable[Action],
) -> dict[str, Any]:
    """Runs one evaluation, or those that have names; returns NumPy values.

    The outputs of several are nested. Actions are called once, with the whole output.
    """

    def run(evaluator: Any, name: str) -> dict[str, Any]:
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
        took = f"eval time: {seconds: 6.1f} sec"
        log_line("eval", step, *named, took, f"output: {format_output(output)}")
        curves.write_evaluation(step, output, name=name, seconds=seconds)
        return output

    if isinstance(evaluator, Mapping):
        output = {name: run(each, name) for name, each in evaluator.items()}
    else:
        output = run(evaluator, "")
    with scope():
        for action in actions:
            expire_boundary()
            action(output)
    return output
