"""Runs and reports evaluations."""

import time
from collections.abc import Iterable, Mapping
from typing import Any

from armillary._json_values import find_numbers
from armillary.cluster._join import expire_boundary
from armillary.controller._history import add_record
from armillary.controller._outputs import fetch_output, format_output, log_line
from armillary.controller._run import Run, call_actions
from armillary.controller._saving import Saving
from armillary.goodput._stopwatch import Category
from armillary.lifeline._lifeline import waiting
from armillary.typing import Action


def run_evaluations(
    run: Run,
    saving: Saving,
    evaluator: Any,
    num_steps: int,
    actions: Iterable[Action],
) -> dict[str, Any]:
    """Runs and reports one evaluation, or several by name with nested outputs."""
    step = run.read_step()
    if isinstance(evaluator, Mapping):
        output = {
            name: _evaluate(run, evaluation, step, num_steps, name)
            for name, evaluation in evaluator.items()
        }
    else:
        output = _evaluate(run, evaluator, step, num_steps)

    saving.note_evaluation(output)
    with run.scope():
        call_actions(actions, output)
    saving.save_best()
    add_record(run.history.eval, step, find_numbers(output))
    return output


def _evaluate(
    run: Run, evaluator: Any, step: int, num_steps: int, name: str = ""
) -> dict[str, Any]:
    """Runs and reports one evaluation; returns its output."""
    named = [name] if name else []
    # "Up to", because the data may end before `num_steps` steps.
    amount = "complete" if num_steps == -1 else f"up to {num_steps} steps of"
    log_line("eval", step, *named, f"running {amount} evaluation...")

    start = time.perf_counter()
    with run.goodput.phase(Category.EVALUATING):
        with run.scope():
            output = evaluator.evaluate(num_steps)
        with waiting():
            output = fetch_output(output, "evaluator.evaluate")
    seconds = time.perf_counter() - start
    expire_boundary()
    run.goodput.mark("evaluation", step)

    took = f"eval time: {seconds: 6.1f} sec"
    log_line("eval", step, *named, took, f"output: {format_output(output)}")
    nested = {name: output} if name else output
    fields = {"name": name, "seconds": seconds, "values": find_numbers(output)}
    run.eval_curves.write("eval", step, nested, **fields)
    run.eval_curves.flush()
    return output
